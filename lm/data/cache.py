"""The encoded corpus on disk: made once per host, checked at each use, made again if damaged."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lm.data.encoding import ID_DTYPE, SPLITS, encode_corpus
from lm.data.vocabulary import Vocabulary
from lm.errors import RunError
from lm.files import locked, private_name, sha256_of, short_name, write_atomically

FORMAT = 1  # part of the key: raise it whenever the same text would give other files
# Hashing so much takes tens of milliseconds; the checksums of larger files are remembered.
ALWAYS_HASHED_BYTES = 32 << 20
# A file changed again within one tick of its file system's clock keeps its time stamps, so the
# checksum of a file that has just changed is not remembered. (The coarsest clocks tick in 2 s.)
_CLOCK_TICK_NS = 2_000_000_000
_ENTRY_FILES = ("vocabulary.txt", *tuple(f"{split}.ids" for split in SPLITS))

logger = logging.getLogger("lm")


class EncodedCorpus(NamedTuple):
    """What a cache entry holds: memory-mapped int32 ids per split, and their vocabulary."""

    splits: Mapping[str, np.ndarray]
    vocabulary: Vocabulary
    num_unknown: Mapping[str, int]


def cache_directories(data_path: str) -> list[str]:
    """List where the encoded form of a data directory may be kept, the best place first.

    Beside the texts, so that every user and host of a shared directory finds it; else, as data
    directories of clusters are often read-only, in the user's cache; else in a temporary one.
    """
    name = short_name(os.path.realpath(data_path))
    directories = [os.path.join(data_path, ".cache")]
    user_cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(user_cache):  # the XDG specification: ignore relative ones
        user_cache = os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(user_cache):  # it is not where the user has no home directory
        directories.append(os.path.join(user_cache, "lm-corpus", name))
    with contextlib.suppress(OSError):  # a container may have no writable directory at all
        temporary = os.path.join(tempfile.gettempdir(), f"lm-corpus-{os.getuid()}")
        # Anyone may have made a directory of that name: do not read ids that others put there.
        if not os.path.lexists(temporary) or os.lstat(temporary).st_uid == os.getuid():
            directories.append(os.path.join(temporary, name))
    return directories


def checksum_of(path: str, directories: Sequence[str]) -> str:
    """Hash a file, or remember the hash of a large one whose inode and time stamps are the same.

    Args:
      path: The file.
      directories: Where checksums are remembered; the first writable one gets new ones.

    Returns:
      SHA-256, 64 hexadecimal digits.

    Raises:
      OSError: The file cannot be read.
    """
    status = os.stat(path)
    if status.st_size < ALWAYS_HASHED_BYTES:
        return sha256_of(path)
    # The change time, unlike the modification time, cannot be set back by cp -p or touch.
    stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    memos = _memo_paths(path, directories)
    for memo_path in memos:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or damaged
            with open(memo_path, "rb") as file:
                memo = json.load(file)
            if memo["stamp"] == stamp:
                return str(memo["sha256"])
    settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _CLOCK_TICK_NS
    checksum = sha256_of(path)
    content = json.dumps({"path": path, "stamp": stamp, "sha256": checksum}).encode()
    for memo_path in memos if settled else ():
        with contextlib.suppress(OSError):  # a memo only saves time
            os.makedirs(os.path.dirname(memo_path), exist_ok=True)
            write_atomically(memo_path, content)
            break
    return checksum


def _memo_paths(path: str, directories: Sequence[str]) -> list[str]:
    name = f"checksum-{short_name(os.path.abspath(path))}.json"
    return [os.path.join(directory, name) for directory in directories]


def load_encoded(
    files: Mapping[str, str],
    checksums: Mapping[str, str],
    vocab_size: int | None,
    directories: Sequence[str],
) -> EncodedCorpus:
    """Open the encoded form of three texts; encode them first where that was not done yet.

    Args:
      files: Split -> text file.
      checksums: Split -> SHA-256 of the text.
      vocab_size: Limit of the vocabulary, or None.
      directories: The places to look, and to encode into, in order.

    Raises:
      UserError: A text is unreadable, empty or not UTF-8.
      RunError: None of the directories can be used, or a text changed meanwhile.
    """
    limit = "all" if vocab_size is None else str(vocab_size)
    key = "-".join([f"v{FORMAT}", *(checksums[split][:16] for split in SPLITS), limit])
    for directory in directories:
        with contextlib.suppress(OSError):  # told below, if it stays so
            encoded = _open_entry(os.path.join(directory, key), directories)
            if encoded is not None:
                return encoded
    failures = []
    for directory in directories:
        entry = os.path.join(directory, key)
        try:
            os.makedirs(directory, exist_ok=True)
            with locked(os.path.join(directory, "encoding.lock"), "encoding a corpus"):
                encoded = _open_entry(entry, directories)  # another process may have made it
                if encoded is None:
                    _make_entry(entry, files, checksums, vocab_size, directories)
                    encoded = _open_entry(entry, directories)
            if encoded is not None:
                logger.info("the encoded corpus is kept in %s", entry)
                return encoded
            reason = "what was written there reads back damaged"
        except OSError as error:
            reason = error.strerror or str(error)
        logger.info("the encoded corpus cannot be kept in %s: %s", directory, reason)
        failures.append(f"{directory}: {reason}")
    raise RunError(
        f"no place for the encoded corpus ({'; '.join(failures)}); free some space or "
        f"set XDG_CACHE_HOME to a directory that can be written"
    )


def _make_entry(
    entry: str,
    files: Mapping[str, str],
    checksums: Mapping[str, str],
    vocab_size: int | None,
    directories: Sequence[str],
) -> None:
    # Made beside its place and renamed, so that a killed process never leaves half an entry.
    staging = private_name(os.path.join(os.path.dirname(entry), "encoding"))
    shutil.rmtree(staging, ignore_errors=True)  # left by a killed process: we hold the lock
    try:
        os.mkdir(staging)
        vocabulary, num_unknown = encode_corpus(files, checksums, vocab_size, staging)
        vocabulary.save(os.path.join(staging, "vocabulary.txt"))
        written = {name: sha256_of(os.path.join(staging, name)) for name in _ENTRY_FILES}
        record = {"sha256": written, "num_unknown": num_unknown}
        write_atomically(os.path.join(staging, "entry.json"), json.dumps(record).encode())
        # Where locks do not reach other hosts, one of them may have been faster, and train from it.
        if _open_entry(entry, directories) is None:
            shutil.rmtree(entry, ignore_errors=True)  # a damaged one
            os.rename(staging, entry)
    except RunError:
        # A text is not what its checksum says. Should that have been a remembered one (of a file
        # system whose time stamps cannot be trusted), the next start must not meet it again.
        for memo_path in itertools.chain(*(_memo_paths(f, directories) for f in files.values())):
            with contextlib.suppress(OSError):
                os.remove(memo_path)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _open_entry(entry: str, directories: Sequence[str]) -> EncodedCorpus | None:
    """Return the entry, None where there is none or a damaged one; OSError: it cannot be read."""
    if not os.path.isdir(entry):
        return None
    try:
        with open(os.path.join(entry, "entry.json"), "rb") as file:
            record = json.load(file)
        for name in _ENTRY_FILES:
            if checksum_of(os.path.join(entry, name), directories) != record["sha256"][name]:
                raise ValueError(f"{name} has another checksum than when it was written")
        return EncodedCorpus(
            {s: np.memmap(os.path.join(entry, f"{s}.ids"), ID_DTYPE, mode="r") for s in SPLITS},
            Vocabulary.load(os.path.join(entry, "vocabulary.txt")),
            {split: int(record["num_unknown"][split]) for split in SPLITS},
        )
    # Not of another OSError: what cannot be read for a moment must stay, other jobs may be training
    # from it.
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise cause from None  # of the vocabulary
        logger.info("the encoded corpus in %s is damaged (%s)", entry, error)
        return None
