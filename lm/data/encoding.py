"""Convert text files to files of token IDs, and keep these files in a cache on disk.

Each text is read as a stream, so that memory contains only the distinct words and one block of
text. The first pass numbers the words in the order of their first occurrence, and writes these
provisional IDs. The second pass replaces the provisional IDs by the IDs of the vocabulary. The
cache is written once per host, verified at each start, and rebuilt if it is corrupt. All processes
of a host map the same files into memory.
"""

import collections
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from lm import logger
from lm.config import Config
from lm.data.arrays import read_id_files
from lm.data.splits import Source
from lm.errors import RunError, UserError
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
from lm.perplexity import TextSize
from lm.record import from_json
from lm.tokens.selection import saved_tokenizer
from lm.tokens.symbols import BUILT
from lm.tokens.text import measured, read_blocks, sha256_of_text
from lm.tokens.tokenizers import UNKNOWN, Tokenizer, Words
from lm.tokens.vocabulary import UNK, Vocabulary

ID_DTYPE = np.dtype("<i4")  # The files are little-endian on every machine.
_ID_BLOCK_BYTES = 1 << 20
_IDS_FILE, _ENTRY_FILE = "{}.ids", "entry.json"  # the files of an entry of the cache
# The modules of lm/ that determine the token IDs of a text.
_RULES = (
    "data/arrays.py", "data/encoding.py", "data/splits.py", "tokens/subwords.py",
    "tokens/symbols.py", "tokens/text.py", "tokens/tokenizers.py", "tokens/vocabulary.py",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that determines the token IDs of a corpus."""

    sources: Mapping[str, Source]  # for each split
    sha256: Mapping[str, str]  # for each split
    config: Config
    tokenizer: Tokenizer | None  # None: the training text determines the vocabulary

    @property
    def key(self) -> str:
        """The name of the encoded corpus in a cache."""
        parts = [f"v{_sha256_of_rules()[:16]}", *(sha256[:16] for sha256 in self.sha256.values())]
        config = self.config
        name = self.tokenizer.name if self.tokenizer else config.tokenizer
        # The file of a vocabulary does not contain the name of its tokenizer.
        parts += [name] * (name in BUILT and name != Words.name)
        if self.tokenizer:
            parts.append(self.tokenizer.sha256[:16])
        else:
            parts.append("all" if config.vocab_size is None else str(config.vocab_size))
            parts += [f"min{config.min_count}"] * (config.min_count > 1)
        if self.sources["train"].reads_ids:
            parts.append(config.token_dtype)
        return "-".join(parts)


@functools.cache
def _sha256_of_rules() -> str:
    """Return a checksum of the code that converts text to token IDs."""
    package = pathlib.Path(__file__).parents[1]
    return hashlib.sha256(b"".join((package / name).read_bytes() for name in _RULES)).hexdigest()


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The statistics of an encoded split."""

    unknown: int  # number of parts that became `<unk>`; a literal `<unk>` does not count
    size: TextSize | None  # None if the files contain token IDs


def encode_source(
    source: Source, tokenizer: Tokenizer, id_path: str, token_dtype: str = "uint16"
) -> Encoded:
    """Write the token IDs of a split to a file of ID_DTYPE.

    If the vocabulary does not contain `<unk>`, unknown text gets the ID len(tokenizer).
    """
    unk_id = len(tokenizer) if tokenizer.unk_id is None else tokenizer.unk_id
    size = None if source.reads_ids else TextSize()
    num_unknown = 0
    if source.reads_ids:
        blocks = read_id_files(source.parts, token_dtype, len(tokenizer))
    else:
        blocks = tokenizer.read_ids(measured(read_blocks(source.parts, "encoding"), size))
    with open(id_path, "wb") as file:
        for block in blocks:
            ids = block.astype(ID_DTYPE)
            num_unknown += _replace_unknown(ids, unk_id)
            file.write(ids.tobytes())
        if not file.tell():
            raise UserError(f"{source.path} does not contain any tokens")
    return Encoded(num_unknown, size)


def encode_corpus(recipe: Recipe, directory: str) -> tuple[Tokenizer, dict[str, Encoded]]:
    """Write `<split>.ids` for each split, and return the tokenizer.

    If the vocabulary is built from the training text without a limit, `<unk>` is added to it only
    if valid or test contain unknown words. The ID of `<unk>` is then the largest ID, because
    `<unk>` does not occur in the training text.
    """
    config, tokenizer = recipe.config, recipe.tokenizer
    paths = {split: os.path.join(directory, _IDS_FILE.format(split)) for split in recipe.sources}
    pieces, found = _new_ids(), {}
    # The long split comes last, so that invalid bytes in the short splits are found within seconds.
    for split, source in reversed(recipe.sources.items()):
        logger.info("encoding %s", source.path)
        if tokenizer:
            found[split] = encode_source(source, tokenizer, paths[split], config.token_dtype)
        else:
            found[split] = _write_pieces(source, BUILT[config.tokenizer], pieces, paths[split])
        if sha256_of_text(source.parts) != recipe.sha256[split]:
            raise RunError(f"{source.path} changed while it was being read; start again")
    if tokenizer:
        return tokenizer, found
    kind = BUILT[config.tokenizer]
    entries = [kind.entry(piece) for piece in pieces]
    counts = collections.Counter()
    for word, count in zip(entries, _count_ids(paths["train"], len(entries))):
        counts[word] += count
    vocabulary = Vocabulary.from_counts(+counts, config)  # + removes words that train lacks
    for split, path in paths.items():
        num_unknown = _replace_ids(path, entries, vocabulary)
        found[split] = dataclasses.replace(found[split], unknown=num_unknown)
    if any(split.unknown for split in found.values()) and vocabulary.unk_id is None:
        vocabulary = Vocabulary((*vocabulary.words, UNK))
    return kind(vocabulary), found


def _new_ids() -> dict[str, int]:
    """Return an empty dictionary that gives each new piece the next ID."""
    return collections.defaultdict(itertools.count().__next__)


def _write_pieces(
    source: Source, kind: type[Words], ids: Mapping[str, int], id_path: str
) -> Encoded:
    """Write the provisional IDs of the pieces of a text."""
    size = TextSize()
    with open(id_path, "wb") as file:
        for pieces in kind.read_pieces(measured(read_blocks(source.parts, "encoding"), size)):
            file.write(np.fromiter(map(ids.__getitem__, pieces), ID_DTYPE, len(pieces)).tobytes())
    return Encoded(0, size)


def _count_ids(id_path: str, num_ids: int) -> list[int]:
    counts = np.zeros(num_ids, np.int64)
    size = max(_ID_BLOCK_BYTES, counts.nbytes)  # adding up counts must not take most of the time
    with open(id_path, "rb") as file:
        while block := file.read(size):
            counts += np.bincount(np.frombuffer(block, ID_DTYPE), minlength=num_ids)
    return counts.tolist()


def _replace_ids(id_path: str, words: Iterable[str], vocabulary: Vocabulary) -> int:
    """Replace provisional IDs by IDs of the vocabulary, and count the unknown words.

    Args:
      words: The word of each provisional ID.
    """
    new_ids = np.array([vocabulary.ids.get(word, UNKNOWN) for word in words], ID_DTYPE)
    unk_id = len(vocabulary) if vocabulary.unk_id is None else vocabulary.unk_id
    num_unknown = 0
    with open(id_path, "r+b") as file:
        while block := file.read(_ID_BLOCK_BYTES):
            ids = new_ids[np.frombuffer(block, ID_DTYPE)]
            num_unknown += _replace_unknown(ids, unk_id)
            file.seek(-len(block), os.SEEK_CUR)
            file.write(ids.tobytes())
    return num_unknown


def _replace_unknown(ids: np.ndarray, unk_id: int) -> int:
    """Replace UNKNOWN in an array, and return its number of occurrences."""
    is_unknown = ids == UNKNOWN
    ids[is_unknown] = unk_id
    return int(np.count_nonzero(is_unknown))


class EncodedCorpus(NamedTuple):
    """The contents of a cache entry."""

    ids: Mapping[str, np.ndarray]  # memory-mapped int32 token IDs of each split
    tokenizer: Tokenizer
    splits: Mapping[str, Encoded]


def cache_directories(data_path: str) -> list[str]:
    """List the directories for the encoded form of a corpus, in the order in which to try them.

    The first directory is next to the text files, so that all hosts of a user find the encoded
    corpus there. The second directory is in the user's cache. It is used if the first directory is
    read-only, as on many clusters, or if other users can write to the first directory.
    """
    directories = [os.path.join(data_path, ".cache")]
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(user_cache):  # It is relative if the user has no home directory.
        name = short_name(os.path.realpath(data_path))
        directories.append(os.path.join(user_cache, "lm-corpus", name))
    return directories


def load_encoded(recipe: Recipe, data_path: str) -> EncodedCorpus:
    """Open the encoded form of a corpus. Encode the corpus first if necessary."""
    failures = []
    for directory in cache_directories(data_path):
        entry = os.path.join(directory, recipe.key)
        try:
            for path in (os.path.dirname(directory), directory):
                os.makedirs(path, 0o755, exist_ok=True)  # the umask may let a group write
                check_private(path)
            encoded = _find_entry(directory, recipe)
            if encoded is None:
                with locked(os.path.join(directory, "encoding.lock"), "encoding a corpus"):
                    # Another process may have created the entry.
                    encoded = _find_entry(directory, recipe) or _create_entry(entry, recipe)
                logger.info("the encoded corpus is in %s", entry)
            return encoded
        except OSError as error:
            logger.info("cannot keep the encoded corpus in %s: %s", directory, error.strerror)
            failures.append(f"{directory}: {error.strerror}")
    raise RunError(
        f"cannot keep the encoded corpus ({'; '.join(failures)}); free some space, or set"
        " XDG_CACHE_HOME to a directory that only you can write to"
    )


def _find_entry(directory: str, recipe: Recipe) -> EncodedCorpus | None:
    """Return the encoded corpus in a cache, or None if it is missing or corrupt."""
    candidates = [recipe]
    if recipe.tokenizer:  # A run that resumes may have built its vocabulary from the same text.
        candidates.append(dataclasses.replace(recipe, tokenizer=None))
    for candidate in candidates:
        found = _open_entry(os.path.join(directory, candidate.key), candidate)
        if found and (not recipe.tokenizer or found.tokenizer.sha256 == recipe.tokenizer.sha256):
            return found
    return None


def _create_entry(entry: str, recipe: Recipe) -> EncodedCorpus:
    # Write under a temporary name and rename, so that a killed process never leaves half an entry.
    # The caller's lock makes it safe to remove the files of a killed process.
    staging = private_name(os.path.join(os.path.dirname(entry), "encoding"))
    shutil.rmtree(staging, ignore_errors=True)
    try:
        os.mkdir(staging, 0o700)  # the umask may let a group write to the files in it
        # Look again: NFS may show an old list of files until this host changes the directory, and
        # jobs on other hosts may already use the entry.
        if encoded := _open_entry(entry, recipe):
            return encoded
        shutil.rmtree(entry, ignore_errors=True)  # a corrupt entry
        tokenizer, splits = encode_corpus(recipe, staging)
        if not recipe.tokenizer:
            tokenizer.save(staging)
        names = [_IDS_FILE.format(split) for split in splits]
        names += [] if recipe.tokenizer else tokenizer.files
        written = {name: sha256_of(os.path.join(staging, name)) for name in names}
        record = dataclasses.asdict(_EntryRecord(written, splits))
        write_atomically(os.path.join(staging, _ENTRY_FILE), json.dumps(record).encode())
        # If locks do not reach other hosts, a faster host may already train from its own entry.
        if not os.path.exists(entry):
            os.rename(staging, entry)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    encoded = _open_entry(entry, recipe)
    if encoded is None:
        raise OSError(errno.EIO, "the written files are corrupt")
    return encoded


@dataclasses.dataclass(frozen=True)
class _EntryRecord:
    sha256: Mapping[str, str]  # for each file
    splits: Mapping[str, Encoded]


def map_ids(path: str) -> np.ndarray:
    """Map a file of token IDs into memory, [tokens]."""
    try:
        return np.memmap(path, ID_DTYPE, mode="r")
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise UserError(
            f"cannot map {path} into memory: raise the limit on the address space (ulimit -v, or"
            " h_vmem of a scheduler) by at least the size of this file"
        ) from error


def _open_entry(entry: str, recipe: Recipe) -> EncodedCorpus | None:
    """Return the entry, or None if it is missing or corrupt."""
    if not os.path.isdir(entry):
        return None
    try:
        check_private(entry)
        with open_regular(os.path.join(entry, _ENTRY_FILE)) as file:
            record = from_json(_EntryRecord, parse_object(file.read()), _ENTRY_FILE)
        for name, expected in record.sha256.items():
            if sha256_of(os.path.join(entry, name)) != expected:
                raise ValueError(f"{name}: checksum mismatch")
        tokenizer = recipe.tokenizer or saved_tokenizer(entry)
        splits = {split: record.splits[split] for split in recipe.sources}
    # Other errors must not replace the entry, because other jobs may be training from it.
    except (FileNotFoundError, ValueError, KeyError) as error:
        logger.info("the encoded corpus in %s is corrupt (%s)", entry, error)
        return None
    ids = {split: map_ids(os.path.join(entry, _IDS_FILE.format(split))) for split in splits}
    return EncodedCorpus(ids, tokenizer, splits)
