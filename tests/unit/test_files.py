"""Appending, atomic writes and locks, with full and unmounted disks."""

import errno
import fcntl
import os
import pathlib
import socket

import pytest

from lm.files import RetryingAppend, locked, write_atomically
from tests.limits import file_size_limit


def test_content_waits_until_the_disk_has_space(tmp_path, caplog):
    path = tmp_path / "file"
    file = RetryingAppend(str(path))
    lines = [f"line {number}\n".encode() for number in range(9)]
    with file_size_limit(17):
        for line in lines[:5]:
            file.write(line)
        assert path.read_bytes() == b"".join(lines)[:17] and "file: File too large" in file.failure
    file.write(lines[5])
    assert file.failure is None and path.read_bytes() == b"".join(lines[:6])
    with file_size_limit(50):
        file.write(lines[6])
        file.write(lines[7])
    file.write(lines[8])
    assert path.read_bytes() == b"".join(lines)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("is_unmounted", [True, False])
def test_content_waits_until_the_disk_is_available_again(tmp_path, caplog, is_unmounted):
    path, moved = tmp_path / "file", tmp_path / "moved"
    file = RetryingAppend(str(path))
    file.write(b"1\n")
    own = pathlib.Path("/proc/self/fd")
    (descriptor,) = [fd for fd in own.iterdir() if fd.exists() and fd.samefile(path)]
    # Writing to an unconnected socket fails as on an unmounted disk, and writing to address 0 fails
    # as on NFS after its server has lost the open files.
    dead = socket.socket(socket.AF_UNIX) if is_unmounted else open("/proc/self/mem", "r+b", 0)
    with dead:
        os.dup2(dead.fileno(), int(descriptor.name))
    path.rename(moved)
    file.sync()
    for line in (b"2\n", b"3\n"):
        file.write(line)
        assert file.failure and not path.exists()
    assert is_unmounted or "file: Input/output error" in caplog.text
    moved.rename(path)
    file.write(b"4\n")
    assert file.failure is file.loss is None and path.read_bytes() == b"1\n2\n3\n4\n"


def test_a_full_disk_that_fails_only_when_flushed_is_reported(tmp_path, monkeypatch, caplog):
    def full(descriptor):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))  # simulate NFS

    file = RetryingAppend(str(tmp_path / "file"))
    file.write(b"line\n")
    file.sync()
    assert file.failure is None
    monkeypatch.setattr(os, "fsync", full)
    file.sync()
    monkeypatch.undo()
    file.write(b"another line\n")
    file.close()
    assert "file: Disk quota exceeded" in file.loss and file.failure is None
    assert "the last lines may be lost" in caplog.text


def test_only_regular_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(str(tmp_path / "pipe"), b"a")
    assert (tmp_path / "pipe").is_fifo()


def test_temporary_files_and_locks_do_not_follow_links(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    for name in ("file.guessed.tmp", "lock"):
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(str(tmp_path / "file"), b"theirs")
    with pytest.raises(OSError, match="symbolic links"), locked(str(tmp_path / "lock")):
        pytest.fail("the lock is held")
    assert victim.read_text() == "mine"


def test_the_lock_of_a_removed_file_is_not_a_lock(tmp_path, monkeypatch):
    path, flock = str(tmp_path / "lock"), fcntl.flock

    def remove_then_lock(file, flags):  # the previous holder ends between open and flock
        os.remove(path)
        flock(file, flags)

    monkeypatch.setattr(fcntl, "flock", remove_then_lock)
    with pytest.raises(FileNotFoundError), locked(path):
        pytest.fail("the lock is held")


def test_an_error_about_a_full_disk_contains_the_path(tmp_path):
    path = str(tmp_path / "file")
    with file_size_limit(17), pytest.raises(OSError, match=r"File too large: .*/file'"):
        write_atomically(path, bytes(18))
    assert list(tmp_path.iterdir()) == []


def test_locks_fall_back_to_the_host_if_the_file_system_has_no_locks(tmp_path, monkeypatch):
    flock, inodes, path = fcntl.flock, [], str(tmp_path / "lock")

    def no_locks_here(file, flags):
        if file.name == path:
            raise OSError(errno.ENOSYS, "Function not implemented")
        inodes.append(os.fstat(file.fileno()).st_ino)
        flock(file, flags)

    monkeypatch.setattr(fcntl, "flock", no_locks_here)
    (tmp_path / "host").mkdir()
    own = tmp_path / f"host/lm-{os.getuid()}"
    monkeypatch.setattr("lm.files.HOST_DIRECTORY", str(tmp_path / "host"))
    with locked(path, "testing"), pytest.raises(BlockingIOError), locked(path):
        pass
    with locked(path):
        assert len(inodes) == 3 and len(set(inodes)) == 1
    own.chmod(0o777)
    with pytest.raises(OSError, match="other users can change it"), locked(path):
        pass
    own.chmod(0o700)
    own.rename(tmp_path / "moved")
    own.symlink_to(tmp_path / "moved")
    with pytest.raises(OSError, match="is a link"), locked(path):
        pass
