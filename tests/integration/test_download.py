"""Downloads of PTB from a real HTTP server that misbehaves."""

import gzip
import itertools
import os
import socket
import subprocess
import sys

import pytest

import lm.data.ptb
from lm.data.corpus import load_corpus
from lm.errors import RunError, UserError
from tests.commands import ROOT, one_error, run_module
from tests.download_server import answer
from tests.ptb_archives import (
    CHECKSUMS,
    FILES,
    GOOD,
    assert_rejected,
    download,
    files_in,
    ptb_members,
    tar_of,
)

pytestmark = pytest.mark.timeout(60)


def start_download(target, url, **options) -> subprocess.Popen:
    code = (
        "import ast, sys; from lm.data.ptb import download_ptb\n"
        "download_ptb(sys.argv[1], sys.argv[2], (), ast.literal_eval(sys.argv[3]))"
    )
    command = [sys.executable, "-c", code, str(target), url, repr(CHECKSUMS)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)


def serve_plain_files(server):
    for name, content in FILES.items():
        server.serve(f"/raw/{name}", answer(content))
    return server.url("/raw/")


# Successful downloads


@pytest.mark.parametrize(
    "prefix, headers",
    [
        ("simple-examples/data/", {}),
        ("./simple-examples/data/", {"with_length": False}),
        ("", {"Content_Encoding": "gzip"}),
    ],
)
def test_an_archive_is_downloaded_verified_and_unpacked(server, target, prefix, headers):
    archive = gzip.compress(tar_of(*ptb_members(prefix)))
    download(target, server.serve("/a.tgz", answer(archive, **headers)))
    assert files_in(target) == FILES
    umask = os.umask(0)
    os.umask(umask)
    assert (target / "ptb.train.txt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_data_url_replaces_the_public_addresses_and_may_be_a_local_file(server, tmp_path, target):
    download(target, server.url("/public.tgz"), data_url=server.serve("/mine.tgz", answer(GOOD)))
    assert files_in(target) == FILES
    assert server.requests == ["/mine.tgz"]
    (tmp_path / "a.tgz").write_bytes(GOOD)
    for scheme in ("", "file://"):
        local = tmp_path / f"local{len(scheme)}"
        download(local, data_url=f"{scheme}{tmp_path}/a.tgz")
        assert files_in(local) == FILES


def test_redirects_are_followed(server, target):
    server.serve("/b.tgz", answer(GOOD))
    download(target, server.serve("/a.tgz", answer(b"", 302, Location=server.url("/b.tgz"))))
    assert files_in(target) == FILES


def test_only_missing_files_are_downloaded(server, target):
    target.mkdir()
    (target / "ptb.valid.txt").write_bytes(FILES["ptb.valid.txt"])
    inode = (target / "ptb.valid.txt").stat().st_ino
    url = server.serve("/a.tgz", answer(GOOD))
    for _ in range(2):
        download(target, url)
        assert files_in(target) == FILES
        assert (target / "ptb.valid.txt").stat().st_ino == inode
    assert len(server.requests) == 1


# Servers that misbehave


@pytest.mark.parametrize(
    "reply, reason",
    [
        (answer(GOOD)[: -len(GOOD) // 2], "IncompleteRead"),
        (answer(GOOD, with_length=False)[: -len(GOOD) // 2], "not a complete"),
        (answer(b"sorry", 404), "HTTP 404"),
        (b"HTTP/1.1 500 \x1b[31m\r\n\r\n", "HTTP 500"),
        (answer(b"", 302, Location="file:///etc/passwd"), "InvalidSchema"),
        (answer(b"", 302, Location="/a.tgz"), "TooManyRedirects|RemoteDisconnected"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000 + b"\r\n", "HTTPException"),
        (b"", "RemoteDisconnected"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_after_any_failure_the_next_source_is_tried(server, target, reply, reason):
    url = server.serve("/a.tgz", reply)
    assert_rejected(target, rf"a\.tgz: .*{reason}.*--data_url", url)
    download(target, url, serve_plain_files(server))
    assert files_in(target) == FILES


def test_a_server_that_never_finishes_is_abandoned(server, target, monkeypatch):
    monkeypatch.setattr(lm.data.ptb, "SOURCE_SECONDS", 0.3)
    pieces = itertools.chain([answer(b"", with_length=False)], itertools.repeat(b"x" * 100))
    url = server.serve_slowly("/a.tgz", pieces, 0.01)
    assert_rejected(target, r"a\.tgz: not finished after 0.3 seconds", url)
    monkeypatch.setattr(lm.data.ptb, "SOURCE_SECONDS", 30)
    monkeypatch.setattr(lm.data.ptb, "READ_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.tgz"
        assert_rejected(target, r"a\.tgz: TimeoutError", url)


def test_ranks_fail_at_the_same_time(server, target):
    address = server.url("/none.tgz")
    flags = ("--config", "config_small", "--data_path", target, "--data_url", address)
    result = run_module("lm.train", *flags, num_ranks=2)
    assert result.returncode == 1
    assert "no source provided the PTB" in one_error(result, 1, num_ranks=2)
    assert len(server.requests) == 1
    assert f"{target} does not exist: downloading PTB into it; for your own text" in result.stderr
    assert files_in(target) == {}


@pytest.mark.parametrize("path", ["/a.tgz?signature=SECRET", ":99999999/a.tgz?signature=SECRET"])
def test_secrets_in_an_address_are_not_shown(server, target, path):
    url = server.url(path).replace("//", "//me:PASSWORD@")
    with pytest.raises(RunError) as caught:
        download(target, data_url=url)
    assert "SECRET" not in str(caught.value) and "PASSWORD" not in str(caught.value)
    assert lm.data.ptb.without_secrets("/plain/path.tgz") == "/plain/path.tgz"


# Wrong content


def test_a_different_archive_is_not_accepted_as_the_real_one(server, target):
    url = server.serve("/simple-examples.tgz", answer(GOOD))
    with pytest.raises(RunError, match=r"ptb\.train\.txt has the wrong checksum"):
        load_corpus(str(target), data_url=url)
    assert files_in(target) == {}


@pytest.mark.parametrize(
    "data_url",
    "/nowhere/a.tgz file:///nowhere/a.tgz file://otherhost/a.tgz ftp://host/a.tgz"
    " s3://bucket/a.tgz https:/a.tgz /tmp".split(),
)
def test_an_invalid_data_url_is_a_user_error(target, data_url):
    with pytest.raises(UserError, match="data_url"):
        download(target, data_url=data_url)
    assert not target.exists()


def test_files_and_downloads_larger_than_ptb_are_rejected(server, target, monkeypatch):
    monkeypatch.setattr(lm.data.ptb, "MAX_FILE_BYTES", len(FILES["ptb.train.txt"]) - 1)
    url = server.serve("/a.tgz", answer(GOOD))
    message = r"ptb.train.txt has the wrong checksum.*; .*download has more than 39999"
    assert_rejected(target, message, url, serve_plain_files(server))
    monkeypatch.setattr(lm.data.ptb, "MAX_DOWNLOAD_BYTES", 10_000)
    assert_rejected(target, r"a\.tgz.*more than 10000", url)


# Several processes, killed processes, and disks


def test_several_processes_download_once(server, target):
    url = server.serve("/a.tgz", answer(GOOD))
    ranks = [start_download(target, url, stderr=subprocess.PIPE) for _ in range(4)]
    assert [rank.communicate(timeout=40)[1] for rank in ranks] == [""] * 4
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert files_in(target) == FILES
    assert server.requests == ["/a.tgz"]


def test_a_killed_download_leaves_nothing_and_is_repeated(server, target):
    half = answer(GOOD)[: len(GOOD) // 2]
    process = start_download(target, server.serve_slowly("/a.tgz", [half], 60))
    assert server.has_sent.wait(30)
    process.kill()
    process.wait()
    assert files_in(target) == {} and os.listdir(target / ".cache") == ["download.lock"]
    download(target, server.serve("/a.tgz", answer(GOOD)))
    assert files_in(target) == FILES
