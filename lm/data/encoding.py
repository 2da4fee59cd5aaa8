"""Convert text files to files of token IDs, and keep these files in a cache on disk.

Each text is read once, as a stream: memory contains only the distinct words and one block of text.
The first pass writes provisional IDs, in the order in which words occur first, and the second pass
replaces them with the IDs of the vocabulary. The cache is written once per host, verified at each
start, and rebuilt if it is corrupt. All processes of a host map the same files into memory.
"""

import collections
import dataclasses
import errno
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from lm import logger
from lm.config import Config
from lm.data.text import read_words, sha256_of_text
from lm.data.vocabulary import UNK, Vocabulary
from lm.errors import RunError
from lm.files import (
    check_private,
    locked,
    open_regular,
    parse_object,
    private_name,
    sha256_of,
    short_name,
    write_atomically,
)
from lm.record import from_json

SPLITS = ("train", "valid", "test")
ID_DTYPE = np.dtype("<i4")  # files are little-endian on every machine
FORMAT = 2  # part of the cache key; increase it whenever the same text gives different files
_ENTRY_FILES = ("vocabulary.txt", *(f"{split}.ids" for split in SPLITS))

_ID_BLOCK_BYTES = 1 << 20


def encode_file(path: str, vocabulary: Vocabulary, id_path: str) -> int:
    """Write the token IDs of a text file to a file of ID_DTYPE, and count the unknown words.

    If the vocabulary does not contain `<unk>`, unknown words get the ID len(vocabulary).
    """
    provisional_ids = _new_ids()
    _write_ids(path, provisional_ids, id_path)
    return _replace_ids(id_path, provisional_ids, vocabulary)


def encode_corpus(
    files: Mapping[str, str], sha256: Mapping[str, str], config: Config, directory: str
) -> tuple[Vocabulary, dict[str, int]]:
    """Build the vocabulary from the training text, and write `<split>.ids` for each split.

    Without limits, `<unk>` joins the vocabulary only if valid or test contain unknown words. The ID
    of `<unk>` is then the largest ID, because `<unk>` does not occur in the training text. The
    numbers are the words of each split that became `<unk>`.
    """
    provisional_ids = _new_ids()
    id_paths = {split: os.path.join(directory, f"{split}.ids") for split in SPLITS}
    # The long split comes last, so that invalid bytes in the short splits are found within seconds.
    for split in reversed(SPLITS):
        logger.info("encoding %s", files[split])
        _write_ids(files[split], provisional_ids, id_paths[split])
        if sha256_of_text(files[split]) != sha256[split]:
            raise RunError(f"{files[split]} changed while it was being read; start again")
    counts = zip(provisional_ids, _count_ids(id_paths["train"], len(provisional_ids)))
    vocabulary = Vocabulary.from_counts({word: n for word, n in counts if n}, config)
    num_unknown = {
        split: _replace_ids(path, provisional_ids, vocabulary) for split, path in id_paths.items()
    }
    if any(num_unknown.values()) and vocabulary.unk_id is None:
        vocabulary = Vocabulary((*vocabulary.words, UNK))
    return vocabulary, num_unknown


def _new_ids() -> dict[str, int]:
    """Return an empty dictionary that gives each new word the next ID."""
    return collections.defaultdict(itertools.count().__next__)


def _write_ids(path: str, ids: Mapping[str, int], id_path: str) -> None:
    with open(id_path, "wb") as file:
        for words in read_words(path):
            file.write(np.fromiter(map(ids.__getitem__, words), ID_DTYPE, len(words)).tobytes())


def _count_ids(id_path: str, num_ids: int) -> list[int]:
    counts = np.zeros(num_ids, np.int64)
    with open(id_path, "rb") as file:
        while block := file.read(_ID_BLOCK_BYTES):
            counts += np.bincount(np.frombuffer(block, ID_DTYPE), minlength=num_ids)
    return counts.tolist()


def _replace_ids(id_path: str, words: Iterable[str], vocabulary: Vocabulary) -> int:
    """Replace the positions in `words` with IDs of the vocabulary, and count the unknown words."""
    new_ids = np.array([vocabulary.ids.get(word, -1) for word in words], ID_DTYPE)
    unk_id = len(vocabulary) if vocabulary.unk_id is None else vocabulary.unk_id
    num_unknown = 0
    with open(id_path, "r+b") as file:
        while block := file.read(_ID_BLOCK_BYTES):
            ids = new_ids[np.frombuffer(block, ID_DTYPE)]
            num_unknown += int(np.count_nonzero(ids < 0))
            ids[ids < 0] = unk_id
            file.seek(-len(block), os.SEEK_CUR)
            file.write(ids.tobytes())
    return num_unknown


class EncodedCorpus(NamedTuple):
    """The contents of a cache entry."""

    splits: Mapping[str, np.ndarray]  # memory-mapped int32 token IDs of each split
    vocabulary: Vocabulary
    num_unknown: Mapping[str, int]  # per split, the words that became <unk>


def cache_directories(data_path: str) -> list[str]:
    """List the directories for the encoded form of a corpus, in the order in which to try them.

    All hosts of a user find the encoded corpus next to the text files. If the directory is
    read-only, as on many clusters, or if other users can write to it, the user's cache is used.
    """
    directories = [os.path.join(data_path, ".cache")]
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(user_cache):  # the path is relative if the user has no home directory
        name = short_name(os.path.realpath(data_path))
        directories.append(os.path.join(user_cache, "lm-corpus", name))
    return directories


def load_encoded(
    files: Mapping[str, str], sha256: Mapping[str, str], config: Config
) -> EncodedCorpus:
    """Open the encoded form of three text files, which are encoded first if necessary.

    The files of all splits are in one directory.
    """
    limit = "all" if config.vocab_size is None else str(config.vocab_size)
    if config.min_count > 1:
        limit += f"-min{config.min_count}"
    key = "-".join([f"v{FORMAT}", *(sha256[split][:16] for split in SPLITS), limit])
    failures = []
    for directory in cache_directories(os.path.dirname(files["train"])):
        entry = os.path.join(directory, key)
        try:
            for path in (os.path.dirname(directory), directory):
                os.makedirs(path, 0o755, exist_ok=True)  # the umask may let a group write
                check_private(path)
            encoded = _open_entry(entry)
            if encoded is None:
                with locked(os.path.join(directory, "encoding.lock"), "encoding a corpus"):
                    # Another process may have created the entry.
                    encoded = _open_entry(entry) or _create_entry(entry, files, sha256, config)
                logger.info("the encoded corpus is in %s", entry)
            return encoded
        except OSError as error:
            logger.info("cannot keep the encoded corpus in %s: %s", directory, error.strerror)
            failures.append(f"{directory}: {error.strerror}")
    raise RunError(
        f"cannot keep the encoded corpus ({'; '.join(failures)}); free some space, or set"
        " XDG_CACHE_HOME to a directory that only you can write to"
    )


def _create_entry(
    entry: str, files: Mapping[str, str], sha256: Mapping[str, str], config: Config
) -> EncodedCorpus:
    # Write under a temporary name and rename, so that a killed process never leaves half an entry.
    # The caller's lock makes it safe to remove the files of a killed process.
    staging = private_name(os.path.join(os.path.dirname(entry), "encoding"))
    shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(entry, ignore_errors=True)  # a corrupt entry
    try:
        os.mkdir(staging, 0o700)  # the umask may let a group write to the files in it
        vocabulary, num_unknown = encode_corpus(files, sha256, config, staging)
        vocabulary.save(os.path.join(staging, "vocabulary.txt"))
        written = {name: sha256_of(os.path.join(staging, name)) for name in _ENTRY_FILES}
        record = {"sha256": written, "num_unknown": num_unknown}
        write_atomically(os.path.join(staging, "entry.json"), json.dumps(record).encode())
        # If locks do not reach other hosts, a faster host may already train from its own entry.
        if not os.path.exists(entry):
            os.rename(staging, entry)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    encoded = _open_entry(entry)
    if encoded is None:
        raise OSError(errno.EIO, "the written files are corrupt")
    return encoded


@dataclasses.dataclass(frozen=True)
class _EntryRecord:
    sha256: Mapping[str, str]  # by file
    num_unknown: Mapping[str, int]  # by split


def _open_entry(entry: str) -> EncodedCorpus | None:
    """Return the entry, or None if it is missing or corrupt."""
    if not os.path.isdir(entry):
        return None
    try:
        check_private(entry)
        with open_regular(os.path.join(entry, "entry.json")) as file:
            record = from_json(_EntryRecord, parse_object(file.read()), "entry.json")
        for name in _ENTRY_FILES:
            if sha256_of(os.path.join(entry, name)) != record.sha256[name]:
                raise ValueError(f"{name}: checksum mismatch")
        return EncodedCorpus(
            {s: np.memmap(os.path.join(entry, f"{s}.ids"), ID_DTYPE, mode="r") for s in SPLITS},
            Vocabulary.load(os.path.join(entry, "vocabulary.txt")),
            {split: record.num_unknown[split] for split in SPLITS},
        )
    # Other errors must not replace the entry, because other jobs may be training from it.
    except (FileNotFoundError, ValueError, KeyError) as error:
        logger.info("the encoded corpus in %s is corrupt (%s); rebuilding", entry, error)
        return None
