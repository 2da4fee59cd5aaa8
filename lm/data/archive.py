"""Take a few known files out of an archive that nobody has to trust."""

from __future__ import annotations

import contextlib
import gzip
import os
import tarfile
import zlib
from collections.abc import Mapping
from typing import BinaryIO

from lm.data.download import SourceError, writing

_BLOCK_BYTES = 1 << 16
_MAX_UNPACKED_BYTES = 1 << 30  # a small file of zeros may unpack to terabytes


def extract(archive: str, targets: Mapping[str, str], max_bytes: int) -> None:
    """Copy members of a .tgz to files.

    No other member is read, no path in the archive is used, no link is followed, no hole of a
    sparse file is filled: what a malicious archive holds stays in it.

    Args:
      archive: The path of the .tgz.
      targets: Member name, as without a leading "./" -> the file to write.
      max_bytes: The most that one of them may have; it is known before anything is written.

    Raises:
      SourceError: The archive is damaged, lacks a member, or has something else in its place.
      RunError: A file cannot be written.
    """
    wanted = dict(targets)
    try:
        with (
            gzip.open(archive) as unzipped,
            tarfile.open(fileobj=_Bounded(unzipped), mode="r|") as tar,
        ):
            for member in tar:
                target = wanted.pop(member.name.removeprefix("./"), None)
                if target is None:
                    continue
                # A sparse file of 200 bytes in the archive may be terabytes of zeros on the disk.
                if not member.isreg() or member.issparse():
                    raise SourceError(f"{member.name} in the archive is not a regular file")
                if member.size > max_bytes:
                    raise SourceError(
                        f"{member.name} in the archive has {member.size} bytes, more than the"
                        f" expected {max_bytes}"
                    )
                _copy(tar.extractfile(member), target)
                if not wanted:
                    return
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:  # OSError: BadGzipFile
        raise SourceError(f"not a complete .tgz archive ({error})") from error
    raise SourceError(f"the archive has no {', '.join(wanted)}")


def _copy(source: BinaryIO, target: str) -> None:
    directory = os.path.dirname(target)
    with contextlib.ExitStack() as stack:
        with writing(directory):
            file = stack.enter_context(open(target, "wb"))
        # Errors of the archive, which is read in between, are no reason to speak of the disk.
        for block in iter(lambda: source.read(_BLOCK_BYTES), b""):
            with writing(directory):
                file.write(block)
        with writing(directory):
            file.flush()
            os.fsync(file.fileno())  # a power cut after the rename must not leave it empty


class _Bounded:
    """A reader that stops at a size that no honest archive has."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, _MAX_UNPACKED_BYTES

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise SourceError(f"the archive unpacks to more than {_MAX_UNPACKED_BYTES} bytes")
        return data
