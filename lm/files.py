"""Files: checksums, locks and atomic writes."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from lm import logger
from lm.system import at_stop

_BLOCK_BYTES = 1 << 20
# Some cluster file systems do not support locks, such as Lustre mounted without flock.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
HOST_DIRECTORY = "/tmp"  # TMPDIR may differ between jobs.


def sha256_of(path: str) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def open_regular(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading; raise OSError for a FIFO or a device, which could block forever."""
    try:
        with open(path, "rb", opener=_open_if_regular) as file:
            yield file
    except OSError as error:
        error.filename = error.filename or path  # Errors of `read` do not contain the path.
        raise


def _open_if_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", path)


def no_link(path: str, flags: int) -> int:
    """Open a file; raise OSError if it is a link, which another user may have created.

    This function is an opener for `open`.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            problem = f"{os.path.basename(path)} is a link; replace it by its target"
            raise OSError(errno.ELOOP, problem, path) from error
        raise


def short_name(text: str) -> str:
    """Return a file name that identifies a string, such as a path."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def private_name(name: str) -> str:
    """Add the name of the host to the name of a file that hosts must not share."""
    return f"{name}-{socket.gethostname()}"


def check_private(path: str) -> None:
    """Raise PermissionError if users other than this user and root can change a file or directory.

    A checksum that is stored beside the content does not reveal that both were replaced.
    """
    status = os.stat(path)
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "other users can change it", path)


@contextlib.contextmanager
def unfinished(path: str) -> Iterator[None]:
    """Remove a temporary file or directory after the block, or at a stop signal."""
    with at_stop(functools.partial(_remove_at_stop, path)):
        try:
            yield
        finally:
            _remove(path)


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)  # leaves a file
    with contextlib.suppress(OSError):
        os.remove(path)


def _remove_at_stop(path: str) -> None:
    # Rename first: the main thread may be moving the finished files away at this moment.
    doomed = f"{path}.removed"
    with contextlib.suppress(OSError):
        os.rename(path, doomed)
        _remove(doomed)


@contextlib.contextmanager
def temporary_directory(parent: str, prefix: str) -> Iterator[str]:
    """Create a directory for unfinished files; see `unfinished`."""
    path = tempfile.mkdtemp(prefix=prefix, dir=parent)
    with unfinished(path):
        yield path


@contextlib.contextmanager
def open_atomically(path: str) -> Iterator[BinaryIO]:
    """Open a file that replaces an existing file or link atomically if the block succeeds."""
    if os.path.exists(path) and not os.path.isfile(path):  # Do not replace /dev/null.
        raise OSError(errno.EINVAL, "not a regular file", path)
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    try:
        with unfinished(temporary):
            with open(temporary, "xb") as file:  # does not follow a link of another user
                yield file
                file.flush()
                os.fsync(file.fileno())  # Otherwise, a power failure could leave an empty file.
            os.replace(temporary, path)
    except OSError as error:
        error.filename = path  # Errors about full disks do not contain the path.
        raise


def write_atomically(path: str, content: bytes) -> None:
    """Write a file atomically; see `open_atomically`."""
    with open_atomically(path) as file:
        file.write(content)


@contextlib.contextmanager
def locked(path: str, activity: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel releases even if this process is killed.

    Args:
      path: The lock file, which is created if it is missing, and stays.
      activity: The activity of the holder ("downloading ..."), for the log of waiting processes.
        None does not wait.

    Raises:
      BlockingIOError: If another process holds the lock, and this process does not wait.
      FileNotFoundError: If the previous holder removed the file.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "ab", opener=_open_lock))
        try:
            _lock(file, activity)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            # Fall back to a lock file on this host, which excludes only processes of this host.
            name = f"{short_name(os.path.realpath(path))}.lock"
            own = os.path.join(_private_directory(), name)
            _lock(stack.enter_context(open(own, "ab", opener=_open_lock)), activity)
        # Only the holder may remove the file. A process that waited for a removed file must not
        # hold the lock together with a process that created a new file.
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        yield


def _open_lock(path: str, flags: int) -> int:
    return no_link(path, flags | os.O_NONBLOCK)


def _private_directory() -> str:
    """Create a directory that no other user can write to."""
    path = os.path.join(HOST_DIRECTORY, f"lm-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.path.islink(path):
        raise PermissionError(errno.EPERM, "is a link", path)
    check_private(path)
    return path


def _lock(file: BinaryIO, activity: str | None) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if activity is None:
            raise
        logger.info("waiting for another process that is %s (lock %s)", activity, file.name)
        fcntl.flock(file, fcntl.LOCK_EX)
