"""PTB in untrusted archives."""

import gzip
import os
import shutil
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.errors import RunError
from tests.ptb_archives import (
    FILES,
    GOOD,
    TAR,
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
        (b"<html>log in to the hotel network</html>", "not a complete"),
        (b"", "does not contain"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_archive_is_one_error_and_leaves_nothing(tmp_path, archive, message):
    (tmp_path / "a.tgz").write_bytes(archive)
    assert_rejected(tmp_path / "data", message, data_url=str(tmp_path / "a.tgz"))


def test_other_members_are_not_unpacked(tmp_path):
    hostile = [
        member("../escaped.txt", b"x"),
        member(str(tmp_path / "absolute.txt"), b"x"),
        member("simple-examples/data", type=tarfile.SYMTYPE, linkname=str(tmp_path)),
        member("fifo", type=tarfile.FIFOTYPE),
        member("pax", pax_headers={"GNU.sparse.map": "x", "size": "9" * 100_000}),
    ]
    (tmp_path / "a.tgz").write_bytes(gzip.compress(tar_of(*hostile, *ptb_members())))
    download(tmp_path / "data", data_url=str(tmp_path / "a.tgz"))
    assert files_in(tmp_path / "data") == FILES
    assert sorted(os.listdir(tmp_path)) == ["a.tgz", "data"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1535), st.integers(0, 255)), max_size=6), st.booleans())
def test_any_archive_gives_the_published_files_or_an_error(tmp_path, changes, is_of_tar):
    content = bytearray(TAR if is_of_tar else GOOD)
    for position, byte in changes:
        content[position] = byte
    (tmp_path / "a.tgz").write_bytes(gzip.compress(content, 1) if is_of_tar else content)
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
    try:
        download(tmp_path / "data", data_url=str(tmp_path / "a.tgz"))
    except RunError:
        assert not (tmp_path / "data").exists()
    else:
        assert files_in(tmp_path / "data") == FILES
