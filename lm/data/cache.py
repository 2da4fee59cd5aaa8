"""The cache of encoded corpora on disk.

An entry is written once per host. At each start, one process of each host verifies it, and rebuilds
it if it is corrupt. All processes of a host map the same files into memory.
"""

import dataclasses
import errno
import functools
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lm import logger
from lm.data.encoding import Encoded, Recipe, encode_corpus, ids_file, map_ids
from lm.errors import RunError
from lm.files import (
    check_private,
    locked,
    open_regular,
    private_name,
    sha256_of,
    short_name,
    unfinished,
    write_atomically,
)
from lm.json_files import from_json, parse_object
from lm.tokens.selection import saved_tokenizer
from lm.tokens.symbols import BUILT
from lm.tokens.tokenizers import Tokenizer, Words

_ENTRY_FILE = "entry.json"
# The modules of lm/ that determine the token IDs of a text.
_RULES = (
    "data/arrays.py", "data/encoding.py", "data/splits.py", "tokens/subwords.py",
    "tokens/symbols.py", "tokens/text.py", "tokens/tokenizers.py", "tokens/vocabulary.py",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _EntryRecord:
    sha256: Mapping[str, str]  # for each file
    splits: Mapping[str, Encoded]


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
        entry = os.path.join(directory, _key(recipe))
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
    if isinstance(
        recipe.tokenizer, Words
    ):  # A run that resumes may have built its vocabulary from the same text.
        candidates.append(dataclasses.replace(recipe, tokenizer=None))
    for candidate in candidates:
        found = _open_entry(os.path.join(directory, _key(candidate)), candidate)
        if found and (not recipe.tokenizer or found.tokenizer.sha256 == recipe.tokenizer.sha256):
            return found
    return None


def _create_entry(entry: str, recipe: Recipe) -> EncodedCorpus:
    # Write under a temporary name and rename, so that a killed process never leaves half an entry.
    # The caller's lock makes it safe to remove the files of a killed process.
    staging = private_name(os.path.join(os.path.dirname(entry), "encoding"))
    shutil.rmtree(staging, ignore_errors=True)
    with unfinished(staging):
        os.mkdir(staging, 0o700)  # the umask may let a group write to the files in it
        # Look again: NFS may show an old list of files until this host changes the directory, and
        # jobs on other hosts may already use the entry.
        if encoded := _open_entry(entry, recipe):
            return encoded
        shutil.rmtree(entry, ignore_errors=True)  # a corrupt entry
        tokenizer, splits = encode_corpus(recipe, staging)
        if not recipe.tokenizer:
            tokenizer.save(staging)
        names = [ids_file(split) for split in splits]
        names += [] if recipe.tokenizer else tokenizer.files
        written = {name: sha256_of(os.path.join(staging, name)) for name in names}
        record = dataclasses.asdict(_EntryRecord(written, splits))
        write_atomically(os.path.join(staging, _ENTRY_FILE), json.dumps(record).encode())
        # If locks do not reach other hosts, a faster host may already train from its own entry.
        try:
            os.rename(staging, entry)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    encoded = _open_entry(entry, recipe)
    if encoded is None:
        raise OSError(errno.EIO, "the written files are corrupt")
    return encoded


def _open_entry(entry: str, recipe: Recipe) -> EncodedCorpus | None:
    """Return the entry, or None if it is missing or corrupt."""
    if not os.path.isdir(entry):
        return None
    try:
        check_private(entry)
        with open_regular(os.path.join(entry, _ENTRY_FILE)) as file:
            record = from_json(_EntryRecord, parse_object(file.read()), _ENTRY_FILE)
        for name, expected in () if recipe.is_verified else record.sha256.items():
            if sha256_of(os.path.join(entry, name)) != expected:
                raise ValueError(f"{name}: checksum mismatch")
        tokenizer = recipe.tokenizer or saved_tokenizer(entry)
        splits = {split: record.splits[split] for split in recipe.sources}
    # Other errors must not replace the entry, because other jobs may be training from it.
    except (FileNotFoundError, ValueError, KeyError) as error:
        logger.info("the encoded corpus in %s is corrupt (%s)", entry, error)
        return None
    ids = {split: map_ids(os.path.join(entry, ids_file(split))) for split in splits}
    return EncodedCorpus(ids, tokenizer, splits)


def _key(recipe: Recipe) -> str:
    """Return the name of the encoded corpus in a cache."""
    parts = [f"v{_sha256_of_rules()[:16]}", *(sha256[:16] for sha256 in recipe.sha256.values())]
    config = recipe.config
    name = recipe.tokenizer.name if recipe.tokenizer else config.tokenizer
    # The file of a vocabulary does not contain the name of its tokenizer.
    parts += [name] * (name in BUILT and name != Words.name)
    if recipe.tokenizer:
        parts.append(recipe.tokenizer.sha256[:16])
    else:
        parts.append("all" if config.vocab_size is None else str(config.vocab_size))
        parts += [f"min{config.min_count}"] * (config.min_count > 1)
    if recipe.sources["train"].reads_ids:
        files = [part.path for source in recipe.sources.values() for part in source.parts]
        ends = [os.path.splitext(path)[1] for path in files]  # They determine how files are read.
        parts += [config.token_dtype, short_name(" ".join(ends))]
    return "-".join(parts)


@functools.cache
def _sha256_of_rules() -> str:
    """Return a checksum of the code that converts text to token IDs."""
    package = pathlib.Path(__file__).parents[1]
    return hashlib.sha256(b"".join((package / name).read_bytes() for name in _RULES)).hexdigest()
