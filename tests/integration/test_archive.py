"""PTB in untrusted archives."""

import gzip
import os
import subprocess
import tarfile

import pytest

import lm.data.ptb
from tests.limits import file_size_limit
from tests.ptb_archives import (
    FILES,
    GOOD,
    archive,
    assert_rejected,
    download,
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


def invalid_archives():
    """Yield archives and the errors that they must cause."""
    for kind, linkname in [
        (tarfile.SYMTYPE, "/etc/passwd"),
        (tarfile.LNKTYPE, "simple-examples/README"),
        (tarfile.CHRTYPE, ""),
        (tarfile.BLKTYPE, ""),
        (tarfile.FIFOTYPE, ""),
        (tarfile.DIRTYPE, ""),
    ]:
        hostile = member("simple-examples/data/ptb.train.txt", kind=kind, linkname=linkname)
        yield archive(*ptb_members(train=hostile)), "not a regular file"
    elsewhere = archive(*ptb_members("../simple-examples/data/"))
    yield elsewhere, r"ptb\.train\.txt, .* is not in simple-examples/data"
    wrong = archive(*ptb_members(test=member("simple-examples/data/ptb.test.txt", b"wrong")))
    yield wrong, r"ptb\.test\.txt has the wrong checksum"
    # Headers that make tarfile raise unusual errors.
    number = tarfile.TarInfo("sparse")
    number.pax_headers = {"GNU.sparse.map": "x"}
    yield archive((number, b""), *ptb_members()), "not a complete"
    chain = [member("././@LongLink", kind=tarfile.GNUTYPE_LONGNAME)] * 1500
    yield archive(*chain, *ptb_members()), "not a complete"
    unzipped = gzip.decompress(GOOD)
    yield gzip.compress(unzipped[: len(unzipped) // 2], 1), r"not a complete \.tgz archive"
    broken = bytearray(GOOD)
    broken[len(GOOD) // 2] ^= 0xFF
    yield bytes(broken), "not a complete|has the wrong checksum"
    for page in (b"<html>log in to the hotel network</html>", b"", GOOD[:100]):
        yield page, r"not a complete \.tgz archive|is not in simple-examples"


def test_an_invalid_archive_is_one_error_and_leaves_nothing(server, target):
    for content, message in invalid_archives():
        assert_rejected(target, message, server.serve("/a.tgz", content))
    download(target, server.serve("/a.tgz", GOOD))
    assert visible(target) == FILES


def test_an_archive_that_unpacks_to_a_huge_size_is_rejected(server, target, monkeypatch):
    monkeypatch.setattr(lm.data.ptb, "_MAX_UNPACKED_BYTES", 1 << 20)
    bomb = server.serve("/a.tgz", archive(member("zeros", bytes(8 << 20)), *ptb_members()))
    assert_rejected(target, r"not in simple-examples|not a complete", bomb)


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
    with file_size_limit(1 << 20):  # keeps a failing test from filling the disk
        assert_rejected(target, "not a regular file", data_url=str(tmp_path / "a.tgz"))


def test_files_and_downloads_larger_than_ptb_are_rejected(server, target, monkeypatch):
    urls = [server.serve("/a.tgz", GOOD), server.serve("/endless.tgz", GOOD, with_length=False)]
    for name, content in FILES.items():
        server.serve(f"/raw/{name}", content)
    monkeypatch.setattr(lm.data.ptb, "_MAX_FILE_BYTES", len(FILES["ptb.train.txt"]) - 1)
    message = r"at most 299999 bytes; .*download has more than 299999"
    with file_size_limit(len(GOOD)):
        assert_rejected(target, message, urls[0], server.url("/raw/"))
    monkeypatch.setattr(lm.data.ptb, "_MAX_DOWNLOAD_BYTES", 10_000)
    assert_rejected(target, r"a\.tgz.*more than 10000 bytes; .*endless.*more than 10000", *urls)
