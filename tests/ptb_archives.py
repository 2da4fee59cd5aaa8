"""Correct and corrupt archives in the format of PTB, and a download into a directory."""

import gzip
import hashlib
import io
import random
import tarfile

import pytest

from lm.data.ptb import download_ptb
from lm.errors import RunError

# Incompressible, so that a part of the archive is a part of the files. Every process generates the
# same bytes, because the workers of pytest must collect the same tests.
RANDOM = random.Random(1)
FILES = {
    f"ptb.{split}.txt": RANDOM.randbytes(150_000).hex().encode()
    for split in ("train", "valid", "test")
}
CHECKSUMS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


def member(name, content=b"", kind=tarfile.REGTYPE, linkname=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, linkname, len(content)
    return info, content


def archive(*members) -> bytes:
    """Build a .tgz of (TarInfo, content) pairs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    # No timestamp: all workers of pytest must collect the same tests.
    return gzip.compress(buffer.getvalue(), 1, mtime=0)


def ptb_members(prefix="simple-examples/data/", **replaced):
    return [
        replaced.get(name.split(".")[1]) or member(prefix + name, content)
        for name, content in FILES.items()
    ]


GOOD = archive(member("simple-examples/README", b"x"), *ptb_members())


def download(target, *addresses, data_url=None):
    download_ptb(str(target), data_url, addresses, CHECKSUMS)


def assert_rejected(target, message, *addresses, data_url=None):
    """Check that a download is a one-line error that leaves no files."""
    with pytest.raises(RunError, match=message) as caught:
        download(target, *addresses, data_url=data_url)
    assert "\n" not in str(caught.value)
    assert visible(target) == {} and leftovers(target) == []


def visible(directory) -> dict:
    return {path.name: path.read_bytes() for path in directory.glob("[!.]*")}


def leftovers(directory) -> list:
    """List the files that a download left behind, except the lock."""
    return [path for path in directory.glob(".cache/**/*") if path.suffix != ".lock"]
