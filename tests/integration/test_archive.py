"""PTB in untrusted archives."""

from __future__ import annotations

import gzip
import os
import subprocess
import tarfile

import pytest

import lm.data.ptb
from lm.errors import RunError
from tests.limits import file_size_limit
from tests.ptb_archives import (
    FILES,
    GOOD,
    archive,
    download,
    leftovers,
    member,
    ptb_members,
    visible,
)

pytestmark = pytest.mark.timeout(60)


def test_members_with_other_paths_are_not_unpacked(server, tmp_path, target):
    hostile = [
        member("../escaped.txt", b"x"),
        member(str(tmp_path / "absolute.txt"), b"x"),
        member("simple-examples/data/../../../escaped.txt", b"x"),
        member("simple-examples/data", kind=tarfile.SYMTYPE, linkname=str(tmp_path)),
        member("fifo", kind=tarfile.FIFOTYPE),
    ]
    download(target, server.serve("/a.tgz", archive(*hostile, *ptb_members())))
    assert visible(target) == FILES
    assert os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize(
    ("kind", "linkname"),
    [
        (tarfile.SYMTYPE, "/etc/passwd"),
        (tarfile.LNKTYPE, "simple-examples/README"),
        (tarfile.CHRTYPE, ""),
        (tarfile.BLKTYPE, ""),
        (tarfile.FIFOTYPE, ""),
        (tarfile.DIRTYPE, ""),
    ],
)
def test_an_expected_member_that_is_not_a_regular_file_is_rejected(server, target, kind, linkname):
    hostile = member("simple-examples/data/ptb.train.txt", kind=kind, linkname=linkname)
    with pytest.raises(RunError, match="not a regular file"):
        download(target, server.serve("/a.tgz", archive(*ptb_members(train=hostile))))
    assert visible(target) == {}


def test_members_in_a_different_directory_are_ignored(server, target):
    with pytest.raises(RunError, match=r"ptb\.train\.txt, .* is not in simple-examples/data"):
        download(target, server.serve("/a.tgz", archive(*ptb_members("../simple-examples/data/"))))
    assert visible(target) == {}


def test_an_archive_that_unpacks_to_a_huge_size_is_rejected(server, target, monkeypatch):
    monkeypatch.setattr(lm.data.ptb, "_MAX_UNPACKED_BYTES", 1 << 20)
    bomb = archive(member("zeros", bytes(8 << 20)), *ptb_members())
    with pytest.raises(RunError, match=r"not in simple-examples|not a complete"):
        download(target, server.serve("/a.tgz", bomb))


@pytest.mark.parametrize(
    "form", ["--format=gnu", *(f"--sparse-version={n}" for n in ("0.0", "0.1", "1.0"))]
)
def test_a_sparse_member_is_rejected_before_anything_is_written(tmp_path, target, form):
    """An archive of 200 bytes would fill the disk with zeros."""
    sparse = tmp_path / "simple-examples/data/ptb.train.txt"
    sparse.parent.mkdir(parents=True)
    sparse.touch()
    os.truncate(sparse, 6 << 30)
    command = ["tar", "-S", "--format=posix", form, "-czf", "a.tgz", "simple-examples"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "a.tgz").stat().st_size < 1000
    # The limit keeps a failing test from filling the disk.
    with file_size_limit(1 << 20), pytest.raises(RunError, match="not a regular file"):
        download(target, data_url=str(tmp_path / "a.tgz"))
    assert visible(target) == {} and leftovers(target) == []


def odd_headers():
    """Yield archives with headers that make tarfile raise unusual errors."""
    sparse = tarfile.TarInfo("sparse")
    sparse.pax_headers = {"GNU.sparse.map": "x"}
    yield "an invalid number", [(sparse, b"")]
    yield "a chain of names", [member("././@LongLink", kind=tarfile.GNUTYPE_LONGNAME)] * 1500


@pytest.mark.parametrize(
    "hostile", [pytest.param(members, id=name) for name, members in odd_headers()]
)
def test_invalid_headers_are_one_error_line(server, target, hostile):
    with pytest.raises(RunError, match="not a complete"):
        download(target, server.serve("/a.tgz", archive(*hostile, *ptb_members())))
    assert visible(target) == {} and leftovers(target) == []


def test_a_file_larger_than_ptb_is_rejected_before_it_is_written(server, target, monkeypatch):
    monkeypatch.setattr(lm.data.ptb, "_MAX_FILE_BYTES", len(FILES["ptb.train.txt"]) - 1)
    for name, content in FILES.items():
        server.serve(f"/raw/{name}", content)
    with (
        file_size_limit(len(GOOD)),
        pytest.raises(RunError, match=r"at most 299999 bytes; .*download has more than 299999"),
    ):
        download(target, server.serve("/a.tgz", GOOD), server.url("/raw/"))
    assert visible(target) == {} and leftovers(target) == []


def test_a_corrupt_archive_is_an_error(server, target):
    unzipped = gzip.decompress(GOOD)
    truncated = gzip.compress(unzipped[: len(unzipped) // 2], 1)
    with pytest.raises(RunError, match=r"not a complete \.tgz archive"):
        download(target, server.serve("/a.tgz", truncated))
    broken = bytearray(GOOD)
    broken[len(GOOD) // 2] ^= 0xFF
    with pytest.raises(RunError):
        download(target, server.serve("/b.tgz", bytes(broken)))
    assert visible(target) == {}
