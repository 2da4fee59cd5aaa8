"""PTB in untrusted archives."""

import gzip
import os
import tarfile

import pytest

from tests.ptb_archives import (
    FILES,
    GOOD,
    assert_rejected,
    download,
    files_in,
    member,
    ptb_members,
    tar_of,
)

pytestmark = pytest.mark.timeout(60)

TRAIN = "simple-examples/data/ptb.train.txt"
LINK = member(TRAIN, type=tarfile.SYMTYPE, linkname="/etc/passwd")


@pytest.mark.parametrize(
    "archive, message",
    [
        (gzip.compress(tar_of(*ptb_members(train=LINK))), "not contain ptb.train"),
        (gzip.compress(tar_of(*ptb_members(test=member("ptb.test.txt", b"wrong")))), "checksum"),
        (GOOD[: len(GOOD) // 2], "not a complete"),
        (GOOD[:9999] + b"x" * 99 + GOOD[10098:], "not a complete|wrong checksum|does not contain"),
        (b"<html>log in to the hotel network</html>", "not a complete"),
        (b"", "not a complete"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_archive_is_one_error_and_stores_nothing(tmp_path, archive, message):
    (tmp_path / "a.tgz").write_bytes(archive)
    assert_rejected(tmp_path / "data", message, data_url=str(tmp_path / "a.tgz"))


def test_other_members_are_not_unpacked(tmp_path):
    hostile = [
        member("../escaped.txt", b"x"),
        member(str(tmp_path / "absolute.txt"), b"x"),
        member("simple-examples/data", type=tarfile.SYMTYPE, linkname=str(tmp_path)),
        member("fifo", type=tarfile.FIFOTYPE),
    ]
    (tmp_path / "a.tgz").write_bytes(gzip.compress(tar_of(*hostile, *ptb_members())))
    download(tmp_path / "data", data_url=str(tmp_path / "a.tgz"))
    assert files_in(tmp_path / "data") == FILES
    assert sorted(os.listdir(tmp_path)) == ["a.tgz", "data"]
