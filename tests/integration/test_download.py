"""Downloads of PTB from a real HTTP server that misbehaves."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

import lm.data.ptb
from lm.data.corpus import load_corpus
from lm.errors import RunError, UserError
from tests.commands import ROOT, environment, run_command, run_module
from tests.ptb_archives import (
    CHECKSUMS,
    FILES,
    GOOD,
    archive,
    assert_rejected,
    download,
    leftovers,
    ptb_members,
    visible,
)  # fmt: skip

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def impatient(monkeypatch):
    """Short timeouts, for servers that stall."""
    monkeypatch.setattr(lm.data.ptb, "READ_SECONDS", 0.3)
    monkeypatch.setattr(lm.data.ptb, "RETRIES", lm.data.ptb.RETRIES.new(backoff_factor=0.01))


def start_download(target, url, **options) -> subprocess.Popen:
    code = (
        "import ast, sys; from lm.data.ptb import download_ptb\n"
        "download_ptb(sys.argv[1], sys.argv[2], (), ast.literal_eval(sys.argv[3]))"
    )
    command = [sys.executable, "-c", code, str(target), url, repr(CHECKSUMS)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)


def serve_plain_files(server, **replaced):
    for name, content in {**FILES, **replaced}.items():
        server.serve(f"/raw/{name}", content)
    return server.url("/raw/")


# Successful downloads


@pytest.mark.parametrize(
    "prefix, behavior",
    [
        ("simple-examples/data/", {}),
        ("./simple-examples/data/", {"with_length": False}),
        ("simple-examples/data/", {"headers": {"Content-Encoding": "gzip"}}),
    ],
    ids=["plain", "no length", "labelled as compressed in transit"],
)
def test_an_archive_is_downloaded_verified_and_unpacked(server, target, prefix, behavior):
    download(target, server.serve("/a.tgz", archive(*ptb_members(prefix)), **behavior))
    assert visible(target) == FILES and leftovers(target) == []
    umask = os.umask(0)
    os.umask(umask)
    assert (target / "ptb.train.txt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_data_url_replaces_the_public_addresses_and_may_be_a_local_file(server, tmp_path, target):
    download(target, server.url("/public.tgz"), data_url=server.serve("/mine.tgz", GOOD))
    assert visible(target) == FILES
    assert server.requests == ["/mine.tgz"]
    (tmp_path / "a.tgz").write_bytes(GOOD)
    for scheme in ("", "file://"):
        local = tmp_path / f"local{len(scheme)}"
        download(local, data_url=f"{scheme}{tmp_path}/a.tgz")
        assert visible(local) == FILES


def test_a_redirect_is_followed(server, target):
    location = {"Location": server.serve("/b.tgz", GOOD)}
    download(target, server.serve("/a.tgz", b"", status=302, headers=location))
    assert visible(target) == FILES


def test_only_missing_files_are_downloaded(server, target):
    target.mkdir()
    (target / "ptb.valid.txt").write_bytes(FILES["ptb.valid.txt"])
    inode = (target / "ptb.valid.txt").stat().st_ino
    url = server.serve("/a.tgz", GOOD)
    for _ in range(2):
        download(target, url)
        assert visible(target) == FILES
        assert (target / "ptb.valid.txt").stat().st_ino == inode
    assert len(server.requests) == 1


# Servers that misbehave


@pytest.mark.parametrize("with_length", [True, False])
def test_a_truncated_answer_is_one_error_and_the_next_source_is_tried(server, target, with_length):
    url = server.serve("/a.tgz", GOOD, truncate_after=len(GOOD) // 2, with_length=with_length)
    assert_rejected(target, r"a\.tgz: (IncompleteRead|not a complete).*--data_url", url)
    download(target, url, serve_plain_files(server))
    assert visible(target) == FILES and leftovers(target) == []


def test_a_server_that_does_not_answer_is_an_error(server, target, impatient):
    timeout = r"a\.tgz: TimeoutError"
    assert_rejected(target, timeout, server.serve("/a.tgz", GOOD, stall_after=1000))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert_rejected(target, timeout, f"http://127.0.0.1:{silent.getsockname()[1]}/a.tgz")


def test_a_rejected_request_is_not_repeated(server, target):
    for count, status in enumerate((404, 403, 410), start=1):
        url = server.serve("/a.tgz", b"sorry", status=status)
        assert_rejected(target, rf"a\.tgz: HTTP {status}", url)
        assert len(server.requests) == count


@pytest.mark.parametrize("failures", [2, None])
def test_a_request_to_a_busy_server_is_repeated(server, target, impatient, failures):
    busy = {"status": 503, "headers": {"Retry-After": "3600"}}
    url = server.serve("/a.tgz", GOOD, failures=failures, **busy)
    if failures:
        download(target, url)
        assert visible(target) == FILES
    else:
        assert_rejected(target, r"a\.tgz: HTTP 503", url)
    assert len(server.requests) == (3 if failures else 4)


def test_unreachable_addresses_are_one_error(target):
    """Uses the timeouts of real runs. The name in the second address does not resolve."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refused = f"http://127.0.0.1:{closed.getsockname()[1]}/a.tgz"
    message = r"a\.tgz: Connection refused.*no-such-host\.invalid/raw/: .*--data_url"
    assert_rejected(target, message, refused, "http://no-such-host.invalid/raw/")


def test_ranks_fail_at_the_same_time(server, target):
    address = server.url("/none.tgz")
    flags = ("--config", "config_small", "--data_path", target, "--data_url", address)
    result = run_module("lm.train", *flags, num_ranks=2)
    assert result.returncode == 1
    assert result.stderr.count("lm: error: no source provided the PTB") == 1
    assert len(server.requests) == 1


@pytest.mark.parametrize("path", ["/a.tgz?signature=SECRET", ":99999999/a.tgz?signature=SECRET"])
def test_secrets_in_an_address_are_not_shown(server, target, path):
    url = server.url(path).replace("//", "//me:PASSWORD@")
    with pytest.raises(RunError) as caught:
        download(target, data_url=url)
    assert "SECRET" not in str(caught.value) and "PASSWORD" not in str(caught.value)
    assert lm.data.ptb.without_secrets("/plain/path.tgz") == "/plain/path.tgz"


# Wrong content


def test_a_plain_file_with_the_wrong_checksum_is_an_error(server, target):
    plain = serve_plain_files(server, **{"ptb.valid.txt": FILES["ptb.train.txt"]})
    assert_rejected(target, r"ptb\.valid\.txt has the wrong checksum", plain)


def test_a_different_archive_is_not_accepted_as_the_real_one(server, target):
    url = server.serve("/simple-examples.tgz", GOOD)
    with pytest.raises(RunError, match=r"ptb\.train\.txt has the wrong checksum"):
        load_corpus(str(target), data_url=url)
    assert visible(target) == {}


@pytest.mark.parametrize(
    "data_url",
    [
        "/nowhere/a.tgz",
        "file:///nowhere/a.tgz",
        "file://otherhost/a.tgz",
        "ftp://host/a.tgz",
        "s3://bucket/a.tgz",
        "https:/a.tgz",
        "/tmp",
    ],
)
def test_an_invalid_data_url_is_a_user_error(target, data_url):
    with pytest.raises(UserError, match="data_url"):
        download(target, data_url=data_url)
    assert not target.exists()


# Several processes, and killed processes


def test_several_processes_download_once(server, target):
    url = server.serve("/a.tgz", GOOD)
    ranks = [start_download(target, url, stderr=subprocess.PIPE) for _ in range(4)]
    assert [rank.communicate(timeout=40)[1] for rank in ranks] == [""] * 4
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert visible(target) == FILES
    assert server.requests == ["/a.tgz"]


def test_a_killed_download_leaves_nothing_and_is_repeated(server, target):
    url = server.serve("/a.tgz", GOOD, stall_after=len(GOOD) // 2)
    process = start_download(target, url)
    assert server.stalled.wait(30)
    process.kill()
    process.wait()
    assert visible(target) == {} and leftovers(target) == []
    download(target, server.serve("/a.tgz", GOOD))
    assert visible(target) == FILES


# Disks


def test_a_full_disk_is_one_clear_error(server, tmp_path):
    """The disk is a small file system with too little space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    namespace = ["unshare", "--mount", "--map-root-user"]
    mount = f"mount -t tmpfs -o size=128k,nr_inodes=50 tmpfs {disk}"
    if not shutil.which("unshare"):
        pytest.skip("needs unshare to mount a small file system")
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
    result = run_command([*namespace, "sh", "-c", script, "sh", *command], environment(), 40)
    message, left = result.stdout.splitlines() or [result.stderr, ""]
    assert message.startswith(f"PTB is not in {disk} and cannot be written there")
    assert "(No space left on device); free some space" in message
    assert left == "['other', 'download.lock']"
