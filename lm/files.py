"""Checksums, locks and atomic writes: what every module that shares a directory needs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any, Optional

logger = logging.getLogger("lm")

_BLOCK_BYTES = 1 << 20
# Some cluster file systems (Lustre mounted without flock, a few FUSE ones) have no locks at all.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}
_OF_THE_HOST = "/tmp"  # not TMPDIR, of which each job may have one of its own
_GONE = {errno.ESTALE, errno.ENOTCONN}  # of a descriptor whose disk went, and may be mounted again
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP}  # of a pipe or a terminal


def sha256_of(path: str) -> str:
    """Hash a file without reading it into memory.

    Returns:
      The SHA-256 of its bytes, as 64 hexadecimal digits.

    Raises:
      OSError: The file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()


def short_name(text: str) -> str:
    """Turn any text (a path, an address) into a file name: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def private_name(name: str) -> str:
    """Add the host to a name, so that two hosts whose file system has no locks do not share it."""
    return f"{name}-{socket.gethostname()}"


class PatientFile:
    """A file to add to that outlives a full disk: what finds no room waits for the next write.

    Nobody is stopped by it, and nothing is written twice or in halves. The log says it once.

    Args:
      path: Made if missing.

    Raises:
      OSError: It cannot be opened.
    """

    def __init__(self, path: str):
        self._path = path
        self._file = open(path, "ab", buffering=0)
        self._waiting, self._complaints, self._is_gone = b"", set(), False
        self.failure: Optional[str] = None  # why something is waiting
        self.loss: Optional[str] = None  # why something that was taken may be lost

    def write(self, content: bytes) -> None:
        """Add what has waited, and this."""
        self._waiting += content
        try:
            if self._is_gone:
                self._file = open(self._path, "ab", buffering=0, opener=_open_existing)
                self._is_gone = False
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self.failure = None
        except OSError as error:
            self._is_gone = self._is_gone or error.errno in _GONE
            self.failure = self._complain(error, "what is to be added waits in memory")

    def sync(self) -> None:
        """Bring what has been written to the disk, as far as that can be had; any thread may."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:  # NFS tells of a full disk here
            if error.errno in _GONE:
                self._is_gone = True
                self._complain(error, "what was added last may be lost")
            elif error.errno not in _NO_SYNC:
                self.loss = self._complain(error, "what was added last may be lost")

    def close(self) -> None:
        """Close it; what has waited is lost if there is still no room."""
        self.write(b"")
        try:
            self._file.close()
        except OSError as error:  # NFS again
            self.loss = self._complain(error, "what was added last may be lost")

    def _complain(self, error: OSError, outcome: str) -> str:
        reason = f"cannot write {self._path}: {error.strerror}"
        if outcome not in self._complaints:
            self._complaints.add(outcome)  # first: the log may come back to this very file
            logger.error("%s; %s", reason, outcome)
        return reason


def _open_existing(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT)  # the bare mount point must not get a file of its own


def check_writable(path: str) -> None:
    """Check that a file can be added to, or made where there is none; nothing is changed.

    Raises:
      OSError: It cannot.
    """
    if os.path.isfile(path) or os.path.isdir(path):
        open(path, "ab").close()
    elif not os.path.exists(path):  # else a pipe or a terminal, which opening might end or wait for
        tempfile.TemporaryFile(dir=os.path.dirname(path) or ".").close()


def write_atomically(path: str, content: bytes) -> None:
    """Write a file that other processes see whole or not at all.

    Args:
      path: Where the file goes; an older one is replaced, be it a link.
      content: Its bytes.

    Raises:
      OSError: The file cannot be written; nothing is left behind.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # /dev/null would be one from then on
        raise OSError(errno.EINVAL, "it is not a file", path)
    temporary = private_name(f"{path}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a power cut after the rename must not leave an empty file
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        if isinstance(error, OSError):
            error.filename = path  # a full disk has named none
        raise


def write_json(path: str, value: Any) -> None:
    """Write a value as JSON for people too, whole or not at all; see `write_atomically`."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


@contextlib.contextmanager
def locked(path: str, activity: Optional[str] = None) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel frees even if this process is killed.

    Args:
      path: The lock file; it is made if missing, and stays.
      activity: What the holder does ("downloading ..."), for the log of those who wait; None does
        not wait.

    Raises:
      BlockingIOError: Another process holds it, and this one does not wait.
      OSError: The lock file cannot be opened.
    """
    # Closing the descriptor frees the lock. The file is never removed: a waiter that holds the
    # removed file and a newcomer that makes a new one would both have "the" lock.
    with open(path, "ab") as file:
        try:
            _lock(file.fileno(), path, activity)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            yield
            return
    # One process per host still holds with a lock in a directory of the host.
    name = f"lm-{os.getuid()}-{short_name(os.path.realpath(path))}.lock"
    directory = _OF_THE_HOST if os.access(_OF_THE_HOST, os.W_OK) else tempfile.gettempdir()
    with open(os.path.join(directory, name), "ab") as file:
        _lock(file.fileno(), path, activity)
        yield


def _lock(descriptor: int, path: str, activity: Optional[str]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if activity is None:
            raise
        logger.info("waiting for another process that is %s (lock %s)", activity, path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
