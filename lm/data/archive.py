"""Take a few known files out of an archive that nobody has to trust."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Collection
from typing import BinaryIO

from lm.data.download import SourceError

_MAX_UNPACKED_BYTES = 1 << 30  # a small file of zeros may unpack to terabytes


def extract(archive: str, names: Collection[str], max_bytes: int) -> dict[str, bytes]:
    """Read members of a .tgz.

    No other member is read, no path in the archive is used, no link is followed, no hole of a
    sparse file is filled: what a malicious archive holds stays in it.

    Args:
      archive: The path of the .tgz.
      names: Of the members, as without a leading "./".
      max_bytes: The most that one of them may have; it is known before anything is read.

    Returns:
      The content of each.

    Raises:
      SourceError: The archive is damaged, lacks a member, or has something else in its place.
    """
    contents: dict[str, bytes] = {}
    try:
        with (
            gzip.open(archive) as unzipped,
            tarfile.open(fileobj=_Bounded(unzipped), mode="r|") as tar,
        ):
            for member in tar:
                name = member.name.removeprefix("./")
                if name not in names or name in contents:
                    continue
                # A sparse file of 200 bytes in the archive may be terabytes of zeros in memory.
                if not member.isreg() or member.issparse():
                    raise SourceError(f"{member.name} in the archive is not a regular file")
                if member.size > max_bytes:
                    raise SourceError(
                        f"{member.name} in the archive has {member.size} bytes, more than the"
                        f" expected {max_bytes}"
                    )
                contents[name] = tar.extractfile(member).read()
                if len(contents) == len(names):
                    return contents
    # What gzip and tarfile raise for bytes that are none of theirs: BadGzipFile is an OSError, a
    # bad number in a header a ValueError, a long chain of headers a RecursionError.
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, RecursionError) as error:
        raise SourceError(f"not a complete .tgz archive ({error})") from error
    raise SourceError(f"the archive has no {', '.join(n for n in names if n not in contents)}")


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
