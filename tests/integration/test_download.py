"""Getting PTB over a real, misbehaving HTTP server."""

from __future__ import annotations

import fcntl
import os
import pathlib
import pty
import shutil
import socket
import struct
import subprocess
import sys
import termios
import time

import pytest

import lm.data.archive
import lm.data.corpus
import lm.data.ptb
from lm.data.download import shown
from lm.data.ptb import download_ptb
from lm.errors import RunError, UserError
from tests.commands import run_module
from tests.ptb_archives import (
    CHECKSUMS,
    FILES,
    GOOD,
    HASTY,
    IMPATIENT,
    archive,
    download,
    leftovers,
    member,
    ptb_members,
    visible,
)  # fmt: skip

pytestmark = pytest.mark.timeout(60)

ROOT = pathlib.Path(__file__).parents[2]


def downloader(target, url, **options) -> subprocess.Popen:
    """Start a process that downloads."""
    code = (
        "import ast, sys; from lm.data.ptb import download_ptb\n"
        "from lm.data.download import Patience\n"
        "download_ptb(sys.argv[1], sys.argv[2], (), ast.literal_eval(sys.argv[3]))"
    )
    command = [sys.executable, "-c", code, str(target), url, repr(CHECKSUMS)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)


# What works


@pytest.mark.parametrize("prefix", ["simple-examples/data/", "./simple-examples/data/"])
def test_an_archive_is_downloaded_verified_and_unpacked(server, target, prefix):
    download(target, server.serve("/a.tgz", archive(*ptb_members(prefix))))
    assert visible(target) == FILES
    assert leftovers(target) == []
    umask = os.umask(0)
    os.umask(umask)
    assert (target / "ptb.train.txt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_three_plain_files_are_the_second_source(server, target):
    for name, content in FILES.items():
        server.serve(f"/raw/{name}", content)
    download(target, server.url("/gone.tgz"), server.url("/raw/"))
    assert visible(target) == FILES
    assert leftovers(target) == []


def test_data_url_replaces_the_public_addresses(server, target):
    download(target, server.url("/public.tgz"), data_url=server.serve("/mine.tgz", GOOD))
    assert visible(target) == FILES
    assert [path for path, _ in server.requests] == ["/mine.tgz"]


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}"])
def test_data_url_may_be_a_local_file(tmp_path, target, form):
    (tmp_path / "a.tgz").write_bytes(GOOD)
    download(target, data_url=form.format(tmp_path / "a.tgz"))
    assert visible(target) == FILES


def test_a_redirect_is_followed(server, target):
    moved = server.serve(
        "/a.tgz", b"", status=302, headers={"Location": server.serve("/b.tgz", GOOD)}
    )
    download(target, moved)
    assert visible(target) == FILES


def test_an_archive_labelled_as_compressed_in_transit_is_stored_as_it_is(server, target):
    download(target, server.serve("/a.tgz", GOOD, headers={"Content-Encoding": "gzip"}))
    assert visible(target) == FILES


def test_files_that_are_there_are_kept_and_nothing_is_downloaded(server, target):
    target.mkdir()
    for name, content in FILES.items():
        (target / name).write_bytes(content)
    download(target, server.url("/a.tgz"))
    assert server.requests == []


def test_only_missing_files_are_replaced(server, target):
    target.mkdir()
    (target / "ptb.valid.txt").write_bytes(FILES["ptb.valid.txt"])
    inode = (target / "ptb.valid.txt").stat().st_ino
    download(target, server.serve("/a.tgz", GOOD))
    assert visible(target) == FILES
    assert (target / "ptb.valid.txt").stat().st_ino == inode


def test_other_files_than_the_published_ones_are_not_mixed_with_them(server, target):
    target.mkdir()
    (target / "ptb.valid.txt").write_bytes(b"my own\n")
    with pytest.raises(UserError, match=r"lacks ptb\.train\.txt, .*its ptb\.valid\.txt is not"):
        download(target, server.serve("/a.tgz", GOOD))
    assert visible(target) == {"ptb.valid.txt": b"my own\n"}
    assert server.requests == []


# Servers that misbehave


def test_a_truncated_answer_is_resumed(server, target):
    half = len(GOOD) // 2
    download(target, server.serve("/a.tgz", GOOD, truncate_after=half, failures=1))
    assert visible(target) == FILES
    assert server.requests == [("/a.tgz", None), ("/a.tgz", f"bytes={half}-")]


def test_a_server_that_always_truncates_ends_in_an_error(server, target):
    url = server.serve("/a.tgz", GOOD, truncate_after=1000, ranges=False)
    with pytest.raises(RunError, match=r"a\.tgz: .*--data_url"):
        download(target, url)
    assert visible(target) == {}
    assert len(server.requests) == HASTY.attempts


def test_a_truncated_archive_of_unknown_length_is_an_error(server, target):
    url = server.serve("/a.tgz", GOOD[: len(GOOD) // 2], with_length=False)
    with pytest.raises(RunError, match="not a complete"):
        download(target, url)
    assert visible(target) == {}
    assert leftovers(target) == []


def test_a_server_that_cannot_resume_starts_over(server, target):
    url = server.serve("/a.tgz", GOOD, ranges=False, truncate_after=1000, failures=1)
    download(target, url)
    assert visible(target) == FILES
    assert server.requests[1] == ("/a.tgz", "bytes=1000-")


def test_a_stalled_server_ends_in_an_error(server, target):
    url = server.serve("/a.tgz", GOOD, stall_after=1000)
    with pytest.raises(RunError, match=r"no data for 0\.3 seconds"):
        download(target, url, patience=IMPATIENT)
    assert len(server.requests) == IMPATIENT.attempts
    assert visible(target) == {}


def test_a_server_that_never_answers_ends_in_an_error(target):
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,
        pytest.raises(RunError, match=r"no data for 0\.3 seconds"),
    ):
        download(target, f"http://127.0.0.1:{deaf.getsockname()[1]}/a.tgz", patience=IMPATIENT)


@pytest.mark.parametrize("status", [404, 403, 410])
def test_a_refusal_is_not_tried_again(server, target, status):
    with pytest.raises(RunError, match=rf"a\.tgz: HTTP {status}"):
        download(target, server.serve("/a.tgz", b"sorry", status=status))
    assert len(server.requests) == 1


def test_a_busy_server_is_tried_again(server, target):
    download(target, server.serve("/a.tgz", GOOD, status=503, failures=2))
    assert visible(target) == FILES
    assert len(server.requests) == 3


def test_nothing_that_answers_is_an_error(target):
    """With the patience of real runs: two addresses, one of which has no name."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refused = f"http://127.0.0.1:{closed.getsockname()[1]}/a.tgz"
    with pytest.raises(RunError) as caught:
        download_ptb(str(target), None, (refused, "http://no-such-host.invalid/raw/"))
    message = str(caught.value)
    assert "a.tgz: Connection refused" in message
    assert "no-such-host.invalid/raw/: " in message
    assert "--data_url" in message
    assert "\n" not in message


def test_ranks_do_not_fail_one_after_the_other(server, target):
    address = server.url("/none.tgz")
    flags = ("--config", "config_small", "--data_path", target, "--data_url", address)
    result = run_module("lm.train", *flags, num_ranks=2)
    assert result.returncode == 1 and result.stderr.count("lm: error: no source gave the PTB") == 1
    assert len(server.requests) == 1


def test_more_bytes_than_a_corpus_can_have_are_refused(server, target, monkeypatch):
    monkeypatch.setattr(lm.data.ptb, "_MAX_ARCHIVE_BYTES", 10_000)
    server.serve("/long.tgz", GOOD)
    server.serve("/endless.tgz", GOOD, with_length=False)
    with pytest.raises(RunError, match=r"at most 10000.*more than the expected 10000"):
        download(target, server.url("/long.tgz"), server.url("/endless.tgz"))


def test_secrets_in_an_address_are_not_shown(server, target):
    url = server.url("/a.tgz?signature=SECRET").replace("//", "//me:PASSWORD@")
    with pytest.raises(RunError) as caught:
        download(target, data_url=url)
    assert "SECRET" not in str(caught.value)
    assert "PASSWORD" not in str(caught.value)
    assert shown("/plain/path.tgz") == "/plain/path.tgz"


# Wrong content


def test_a_wrong_checksum_is_an_error_and_not_resumed_from(server, target):
    wrong = archive(*ptb_members(test=member("simple-examples/data/ptb.test.txt", b"wrong")))
    with pytest.raises(RunError, match=r"ptb\.test\.txt has the wrong checksum"):
        download(target, server.serve("/a.tgz", wrong))
    assert visible(target) == {}
    assert leftovers(target) == []
    download(target, server.serve("/a.tgz", GOOD))
    assert visible(target) == FILES


def test_a_plain_file_with_a_wrong_checksum_is_an_error(server, target):
    for name in FILES:
        server.serve(f"/raw/{name}", FILES["ptb.train.txt"])
    with pytest.raises(RunError, match=r"ptb\.valid\.txt has the wrong checksum"):
        download(target, server.url("/raw/"))
    assert visible(target) == {}


@pytest.mark.parametrize("length", [1000, len(GOOD), len(GOOD) + 1000])
def test_a_part_of_other_bytes_does_not_stand_in_the_way(server, target, length):
    url = server.serve("/a.tgz", GOOD, stall_after=500)
    with pytest.raises(RunError):
        download(target, url, patience=IMPATIENT)
    [part] = target.glob(".cache/*/*.part")
    part.write_bytes(bytes(length))
    download(target, server.serve("/a.tgz", GOOD))
    assert visible(target) == FILES


def test_a_part_that_is_whole_is_not_downloaded_again(server, target):
    for name in FILES:
        server.serve(f"/raw/{name}", FILES["ptb.train.txt"])
    with pytest.raises(RunError, match="wrong checksum"):
        download(target, server.url("/raw/"))
    for name, content in FILES.items():
        server.serve(f"/raw/{name}", content)
    server.requests.clear()
    download(target, server.url("/raw/"))
    assert visible(target) == FILES
    assert [path for path, _ in server.requests] == ["/raw/ptb.valid.txt", "/raw/ptb.test.txt"]


@pytest.mark.parametrize("page", [b"<html>log in to the hotel network</html>", b"", GOOD[:100]])
def test_a_page_that_is_no_archive_is_an_error(server, target, page):
    with pytest.raises(RunError, match=r"not a complete \.tgz archive|the archive has no"):
        download(target, server.serve("/a.tgz", page))
    assert visible(target) == {}


@pytest.mark.parametrize(
    "data_url",
    [
        "/nowhere/a.tgz",
        "file:///nowhere/a.tgz",
        "file://otherhost/a.tgz",
        "ftp://host/a.tgz",
        "s3://bucket/a.tgz",
        "http://",
        "https:/a.tgz",
        "http://[::1/a.tgz",
        "/tmp",
    ],
)
def test_a_data_url_that_cannot_be_used_is_a_user_error(target, data_url):
    with pytest.raises(UserError, match="data_url"):
        download(target, data_url=data_url)
    assert not target.exists()


# Many processes, and processes that die


def test_eight_processes_download_once(server, target):
    url = server.serve("/a.tgz", GOOD, stall_after=len(GOOD) // 2)
    ranks = [downloader(target, url, stderr=subprocess.PIPE) for _ in range(8)]
    assert server.stalled.wait(30)
    server.pages["/a.tgz"].stall_after = None
    server.release.set()  # the stalled answer ends, cut short; the download is resumed
    assert [rank.communicate(timeout=40)[1] for rank in ranks] == [""] * 8
    assert [rank.returncode for rank in ranks] == [0] * 8
    assert visible(target) == FILES
    assert server.requests == [("/a.tgz", None), ("/a.tgz", f"bytes={len(GOOD) // 2}-")]


def test_eight_processes_ask_once(server, target):
    url = server.serve("/a.tgz", GOOD)
    ranks = [downloader(target, url) for _ in range(8)]
    assert [rank.wait(timeout=40) for rank in ranks] == [0] * 8
    assert visible(target) == FILES
    assert server.requests == [("/a.tgz", None)]


def test_a_killed_download_leaves_no_half_corpus_and_is_resumed(server, target):
    half = len(GOOD) // 2
    url = server.serve("/a.tgz", GOOD, stall_after=half)
    process = downloader(target, url)
    assert server.stalled.wait(30)
    deadline = time.monotonic() + 30
    while not any(p.stat().st_size for p in target.glob(".cache/*/*.part")):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the bytes are on their way through the loopback
    process.kill()
    process.wait()
    assert visible(target) == {}
    server.pages["/a.tgz"].stall_after = None
    download(target, url)
    assert visible(target) == FILES
    assert leftovers(target) == []
    asked = server.requests[1][1]
    assert 0 < int(asked.removeprefix("bytes=")[:-1]) <= half


# Disks


@pytest.mark.parametrize("kilobytes", [64, 512, 1228])
def test_a_full_disk_is_one_clear_error(server, tmp_path, kilobytes):
    """On a small file system of its own: no room at all, for the archive, for the files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    namespace = ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o size={kilobytes}k,nr_inodes=50 tmpfs {disk}"
    if not shutil.which("unshare"):
        pytest.skip("needs unshare, to mount a small file system")
    if subprocess.run([*namespace, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("needs the permission to mount a small file system")
    code = (
        "import ast, os, sys; from lm.data.ptb import download_ptb\n"
        "from lm.errors import RunError\n"
        "try: download_ptb(sys.argv[1], sys.argv[2], (), ast.literal_eval(sys.argv[3]))\n"
        "except RunError as error: print(error)\n"
        "print([n for _, _, names in os.walk(sys.argv[1]) for n in names])"
    )
    command = [sys.executable, "-c", code, disk, server.serve("/a.tgz", GOOD), repr(CHECKSUMS)]
    script = f'{mount} && head -c 65536 /dev/zero > {disk}/other; exec "$@"'
    result = subprocess.run(
        [*namespace, "sh", "-c", script, "sh", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=40,
    )
    message, left = result.stdout.splitlines() or [result.stderr, ""]
    assert message.startswith(f"cannot write into {disk}")
    assert "No space left on device; free some space" in message
    assert left == "['other', 'download.lock']"


# The real thing


@pytest.mark.ptb
def test_the_real_archive_is_accepted(server, target, ptb_archive):
    with open(ptb_archive, "rb") as file:
        url = server.serve("/simple-examples.tgz", file.read())
    corpus = lm.data.corpus.load_corpus(str(target), data_url=url)
    assert len(corpus.train) == 929_589
    assert len(corpus.vocabulary) == 10_000


def test_another_archive_is_not_accepted_as_the_real_one(server, target):
    url = server.serve("/simple-examples.tgz", GOOD)
    with pytest.raises(RunError, match=r"ptb\.train\.txt has the wrong checksum"):
        lm.data.corpus.load_corpus(str(target), data_url=url)
    assert visible(target) == {}


def test_a_progress_bar_shows_on_a_terminal(server, target):
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process = downloader(target, server.serve("/a.tgz", GOOD), stderr=terminal)
    assert process.wait(timeout=30) == 0
    assert b"downloading: " in os.read(reader, 100_000)
    os.close(reader)
    os.close(terminal)


def test_no_progress_bar_shows_in_a_log_file(server, target):
    process = downloader(target, server.serve("/a.tgz", GOOD), stderr=subprocess.PIPE)
    assert process.communicate(timeout=30) == (None, "")
