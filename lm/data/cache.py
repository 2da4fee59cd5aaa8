"""The encoded corpus on disk: created once per host, verified at each start, rebuilt if corrupt."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lm.data.encoding import ID_DTYPE, SPLITS, encode_corpus
from lm.data.vocabulary import Vocabulary
from lm.errors import RunError
from lm.files import locked, private_name, sha256_of, short_name, write_atomically

FORMAT = 2  # part of the key: increase it whenever the same text would give different files
_ENTRY_FILES = ("vocabulary.txt", *(f"{split}.ids" for split in SPLITS))

logger = logging.getLogger("lm")


class EncodedCorpus(NamedTuple):
    """The contents of a cache entry."""

    splits: Mapping[str, np.ndarray]  # memory-mapped int32 token IDs of each split
    vocabulary: Vocabulary
    num_unknown: Mapping[str, int]  # per split, the words that became <unk>


def cache_directories(data_path: str) -> list[str]:
    """List the directories for the encoded form of a corpus, in the order in which to try them.

    The first directory is next to the text files, so that all users and hosts of a shared
    directory find the encoded corpus. Data directories of clusters are often read-only, so the
    second directory is in the user's cache.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = short_name(os.path.realpath(data_path))
    return [os.path.join(data_path, ".cache"), os.path.join(user_cache, "lm-corpus", name)]


def load_encoded(
    files: Mapping[str, str],
    sha256: Mapping[str, str],
    vocab_size: int | None,
    directories: Sequence[str],
) -> EncodedCorpus:
    """Open the encoded form of three text files. Encode them first if necessary.

    Args:
      files: The text file of each split.
      sha256: The SHA-256 of each text file.
      vocab_size: Limit of the vocabulary, or None.
      directories: The directories to search, and then to encode into, in order.

    Raises:
      UserError: If a text file is unreadable, empty or not UTF-8.
      RunError: If no directory is usable, or if a text file changed in the meantime.
    """
    limit = "all" if vocab_size is None else str(vocab_size)
    key = "-".join([f"v{FORMAT}", *(sha256[split][:16] for split in SPLITS), limit])
    for directory in directories:
        with contextlib.suppress(OSError):  # reported below if the error persists
            encoded = _open_entry(os.path.join(directory, key))
            if encoded is not None:
                return encoded
    failures = []
    for directory in directories:
        entry = os.path.join(directory, key)
        try:
            os.makedirs(directory, exist_ok=True)
            with locked(os.path.join(directory, "encoding.lock"), "encoding a corpus"):
                encoded = _open_entry(entry)  # another process may have created the entry
                if encoded is None:
                    _create_entry(entry, files, sha256, vocab_size)
                    encoded = _open_entry(entry)
            if encoded is not None:
                logger.info("the encoded corpus is in %s", entry)
                return encoded
            reason = "the written files are corrupt"
        except OSError as error:
            reason = error.strerror or str(error)
        logger.info("cannot write the encoded corpus to %s: %s", directory, reason)
        failures.append(f"{directory}: {reason}")
    raise RunError(
        f"cannot write the encoded corpus ({'; '.join(failures)}); free some space, or"
        " set XDG_CACHE_HOME to a writable directory"
    )


def _create_entry(
    entry: str, files: Mapping[str, str], sha256: Mapping[str, str], vocab_size: int | None
) -> None:
    # Written under a temporary name and renamed, so that a killed process never leaves half an
    # entry. The caller's lock makes it safe to remove the files of a killed process.
    staging = private_name(os.path.join(os.path.dirname(entry), "encoding"))
    shutil.rmtree(staging, ignore_errors=True)
    try:
        os.mkdir(staging)
        vocabulary, num_unknown = encode_corpus(files, sha256, vocab_size, staging)
        vocabulary.save(os.path.join(staging, "vocabulary.txt"))
        written = {name: sha256_of(os.path.join(staging, name)) for name in _ENTRY_FILES}
        record = {"sha256": written, "num_unknown": num_unknown}
        write_atomically(os.path.join(staging, "entry.json"), json.dumps(record).encode())
        # If locks do not reach other hosts, a faster host may already train from its own entry.
        if _open_entry(entry) is None:
            shutil.rmtree(entry, ignore_errors=True)  # a corrupt entry
            os.rename(staging, entry)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _open_entry(entry: str) -> EncodedCorpus | None:
    """Return the entry, or None if it is missing or corrupt.

    Raises:
      OSError: If the entry is temporarily unreadable. Other jobs may be training from it, so it
        must not be replaced.
    """
    if not os.path.isdir(entry):
        return None
    try:
        with open(os.path.join(entry, "entry.json"), "rb") as file:
            record = json.load(file)
        for name in _ENTRY_FILES:
            if sha256_of(os.path.join(entry, name)) != record["sha256"][name]:
                raise ValueError(f"{name}: checksum mismatch")
        return EncodedCorpus(
            {s: np.memmap(os.path.join(entry, f"{s}.ids"), ID_DTYPE, mode="r") for s in SPLITS},
            Vocabulary.load(os.path.join(entry, "vocabulary.txt")),
            {split: int(record["num_unknown"][split]) for split in SPLITS},
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        logger.info("the encoded corpus in %s is corrupt (%s); rebuilding", entry, error)
        return None
