"""Convert text files to files of token IDs, and keep these files in a cache on disk.

Each text is read once, as a stream: memory contains only the distinct words and one block of text.
The first pass writes provisional IDs, in the order in which words occur first, and the second pass
replaces them with the IDs of the vocabulary. The cache is written once per host, verified at each
start, and rebuilt if it is corrupt. All processes of a host map the same files into memory.
"""

import codecs
import collections
import dataclasses
import errno
import gzip
import hashlib
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lm import logger
from lm.config import Config
from lm.data.progress import ReadProgress
from lm.data.vocabulary import EOS, UNK, Vocabulary
from lm.errors import RunError, UserError, error_class
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

_BLOCK_BYTES = 1 << 18
_ID_BLOCK_BYTES = 1 << 20
_MAX_WORD_BYTES = 1 << 20
_MOST_RETURNS = 100  # in a text without any line end
_NEWLINE = b"\n"
_SPACES = (_NEWLINE, b" ", b"\t", b"\r")


def read_words(path: str) -> Iterator[list[str]]:
    """Read the words of a text file, with `<eos>` after each line, one block at a time.

    Blocks end between words, not between lines, because some corpora are one line of a gigabyte.
    """
    line, has_words, rest, last, num_eos, num_returns = 1, False, b"", b"", 0, 0
    for block in _read_blocks(path, f"encoding {os.path.basename(path)}"):
        if not last:
            block = block.removeprefix(codecs.BOM_UTF8)
        last = block[-1:] or last
        block = rest + block
        # These bytes never occur inside a UTF-8 character, so that no character is split.
        end = max(map(block.rfind, _SPACES)) + 1
        block, rest = block[:end], block[end:]
        if len(rest) > _MAX_WORD_BYTES:
            raise UserError(
                f"{path}, line {line + block.count(_NEWLINE)}: a word has more than"
                f" {_MAX_WORD_BYTES} bytes, so this is probably not a text file"
            )
        text = _decode(block, path, line)
        num_eos, num_returns = num_eos + text.count(EOS), num_returns + text.count("\r")
        line += block.count(_NEWLINE)
        has_words = has_words or bool(text.strip())
        yield text.replace("\n", f" {EOS} ").split()
    text = _decode(rest, path, line)
    num_eos += text.count(EOS)
    if not has_words and not text.strip():
        raise UserError(f"{path}, line {line}: the file does not contain any words")
    if line == 1 and num_returns > _MOST_RETURNS:
        raise UserError(f"{path} has line ends of CR only: convert it with tr '\\r' '\\n'")
    if num_eos:
        logger.warning(f"{path} contains {EOS} {num_eos} times, and each line end adds another")
    yield text.split() + ([] if last == _NEWLINE else [EOS])


def sha256_of_text(path: str) -> str:
    """Return the SHA-256 of a text. A .gz file has the checksum of the text that it contains."""
    # A named pipe would block forever, and can be read only once.
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is not a file")
    digest = hashlib.sha256()
    for block in _read_blocks(path, f"verifying {os.path.basename(path)}"):
        digest.update(block)
    return digest.hexdigest()


def _read_blocks(path: str, activity: str) -> Iterator[bytes]:
    # This is a separate generator, so that `except` does not catch errors of the caller's output.
    try:
        with open(path, "rb") as file, ReadProgress(activity, os.path.getsize(path)) as progress:
            text = gzip.open(file) if path.endswith(".gz") else file
            while block := text.read(_BLOCK_BYTES):
                progress.show(file.tell())
                yield block
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(
            f"{path} is not a complete .gz file ({error}); compress it again"
        ) from error
    except OSError as error:
        raise error_class(error)(f"cannot read {path}: {error.strerror}") from error


def _decode(block: bytes, path: str, line: int) -> str:
    try:
        return decode_text(block)
    except UnicodeDecodeError as error:
        line += block.count(_NEWLINE, 0, error.start)
        raise UserError(
            f"{path}, line {line}: byte 0x{block[error.start]:02x} is not valid UTF-8, so convert"
            " the file to UTF-8"
        ) from error


def decode_text(block: bytes, encoding: str = "utf-8") -> str:
    """Decode UTF-8. NUL is an error too, because UTF-16 without a byte order mark contains it."""
    nul = block.find(b"\0")
    if nul >= 0:
        raise UnicodeDecodeError(encoding, block, nul, nul + 1, "NUL")
    return block.decode(encoding)


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
