"""Correct archives in the format of PTB, and a download into a directory."""

import gzip
import hashlib
import io
import random
import tarfile

import pytest

from lm.data.ptb import download_ptb
from lm.errors import RunError

# Incompressible, so that a part of the archive is a part of the files.
RANDOM = random.Random(1)
FILES = {
    f"ptb.{split}.txt": RANDOM.randbytes(20_000).hex().encode()
    for split in ("train", "valid", "test")
}
CHECKSUMS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


def member(name, content=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def tar_of(*members) -> bytes:
    """Build a tar file of (TarInfo, content) pairs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def ptb_members(prefix="simple-examples/data/", **replaced):
    return [
        replaced.get(name.split(".")[1]) or member(prefix + name, content)
        for name, content in FILES.items()
    ]


TAR = tar_of(member("simple-examples/README", b"x"), *ptb_members())
GOOD = gzip.compress(TAR, 1, mtime=0)


def download(target, *addresses, data_url=None):
    download_ptb(str(target), data_url, addresses, CHECKSUMS)


def files_in(directory) -> dict:
    return {path.name: path.read_bytes() for path in directory.glob("[!.]*")}


def assert_rejected(target, message, *addresses, data_url=None):
    """Check that a download is a one-line error that stores no files."""
    with pytest.raises(RunError, match=message) as caught:
        download(target, *addresses, data_url=data_url)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
    assert files_in(target) == {}
