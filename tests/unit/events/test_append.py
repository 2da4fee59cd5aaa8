"""Appending to files on full and unmounted disks."""

import errno
import os
import pathlib
import socket

import pytest

from lm.events.append import RetryingAppend
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


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "link").symlink_to("victim")
    with pytest.raises(OSError, match="is a link; replace"):
        RetryingAppend(str(tmp_path / "link"))
    assert not (tmp_path / "victim").exists()


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
