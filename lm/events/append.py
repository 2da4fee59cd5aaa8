"""Append to a file in spite of a full or unmounted disk."""

import errno
import os

from lm import logger
from lm.files import no_link

# The disk is full, or nobody reads a pipe. Opening the pipe again would wait for a reader.
_MAY_WORK_AGAIN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE}
# Pipes and terminals cannot be flushed, and the next write reports an unmounted disk.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ESTALE, errno.ENOTCONN}


class RetryingAppend:
    """Appends to a file. If the disk is full or unmounted, content waits for the next write.

    Every byte is written exactly once and in order. Each kind of failure is logged once.
    """

    def __init__(self, path: str):
        self._path = path
        self._file = open(path, "ab", buffering=0, opener=no_link)
        self._waiting, self._logged, self._is_stale = b"", set(), False
        self.failure: str | None = None  # why content is waiting
        self.loss: str | None = None  # why written content may be lost

    def write(self, content: bytes) -> None:
        """Append the waiting content and the new content."""
        self._waiting += content
        try:
            if self._is_stale:
                self._file = open(self._path, "ab", buffering=0, opener=_open_existing)
                self._is_stale = False
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self.failure = None
        except OSError as error:
            # After other failures, such as an unmount or a lost connection to the disk's server, an
            # open file may never work again.
            self._is_stale = self._is_stale or error.errno not in _MAY_WORK_AGAIN
            self.failure = self._log(error, "new lines wait in memory")

    def sync(self) -> None:
        """Flush the file to the disk. Any thread may call this method."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:  # NFS reports a full disk here.
            if error.errno not in _NO_SYNC:
                self.loss = self._log(error, "the last lines may be lost")

    def close(self) -> None:
        """Close the file after a last attempt to append the waiting content."""
        self.write(b"")
        try:
            self._file.close()
        except OSError as error:  # NFS reports a full disk here.
            self.loss = self._log(error, "the last lines may be lost")

    def _log(self, error: OSError, outcome: str) -> str:
        reason = f"cannot write {self._path}: {error.strerror}"
        if outcome not in self._logged:
            self._logged.add(outcome)  # Do this first, because the log may be this file.
            logger.error("%s; %s", reason, outcome)
        return reason


def _open_existing(path: str, flags: int) -> int:
    return no_link(path, flags & ~os.O_CREAT)  # Do not create a file in an empty mount point.
