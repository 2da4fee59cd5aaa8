"""Atomic writes and locks, also with full disks."""

import errno
import fcntl
import os

import pytest

from lm.files import locked, sha256_of, write_atomically
from tests.limits import file_size_limit


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
    with pytest.raises(OSError, match="is a link"), locked(str(tmp_path / "lock")):
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


def test_an_error_of_reading_contains_the_path():
    with pytest.raises(OSError, match=r"Input/output error: '/proc/self/mem'"):
        sha256_of("/proc/self/mem")  # Address 0 is not mapped.


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
