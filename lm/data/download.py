"""Read files from addresses and archives that may be slow, broken or malicious."""

from __future__ import annotations

import gzip
import io
import tarfile
import urllib.parse
import zlib
from collections.abc import Collection
from typing import BinaryIO

import requests
import tqdm
import urllib3

CONNECT_SECONDS = 4.0
READ_SECONDS = 20.0  # the longest pause between two blocks of data
RETRIES = urllib3.Retry(
    total=3,
    connect=1,  # a cluster without internet gets its error message within seconds
    read=1,
    status_forcelist=(408, 425, 429, 500, 502, 503, 504),
    raise_on_status=False,
    respect_retry_after_header=False,  # a server may ask for hours
    backoff_factor=0.5,
)
_BLOCK_BYTES = 1 << 16
_MAX_UNPACKED_BYTES = 1 << 30  # a small archive of zeros may unpack to terabytes


class SourceError(Exception):
    """A source did not provide the file. The message is one line."""


def without_secrets(address: str) -> str:
    """Remove the password and the query (signed links) from an address, for logs and messages."""
    parts = urllib.parse.urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))


def read_source(source: str, max_bytes: int) -> bytes:
    """Read an http(s) address or a local file, with timeouts, retries and a progress bar.

    Raises:
      SourceError: If the source is unreadable, or if a download has more than max_bytes.
    """
    try:
        if "://" not in source:
            with open(source, "rb") as file:
                return file.read()
        with requests.Session() as session:
            for scheme in ("http://", "https://"):
                session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=RETRIES))
            return _download(session, source, max_bytes)
    except (OSError, urllib3.exceptions.HTTPError) as error:  # RequestException is an OSError
        raise SourceError(_reason(error)) from error


def _download(session: requests.Session, url: str, max_bytes: int) -> bytes:
    # Without this header, a server may compress the file again and send a different length.
    headers = {"Accept-Encoding": "identity"}
    timeouts = (CONNECT_SECONDS, READ_SECONDS)
    with session.get(url, headers=headers, stream=True, timeout=timeouts) as response:
        if response.status_code != 200:
            raise SourceError(f"HTTP {response.status_code} {response.reason}")
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdigit() else None
        if total is not None and total > max_bytes:
            raise SourceError(f"the size is {total} bytes; at most {max_bytes} are expected")
        content = bytearray()
        # disable=None: show no bar if stderr is not a terminal, as in the log of a batch job.
        with tqdm.tqdm(
            total=total, desc="downloading", unit="B", unit_scale=True, leave=False, disable=None
        ) as bar:
            # Some servers label a .tgz "Content-Encoding: gzip". It must not be unpacked here.
            for block in response.raw.stream(_BLOCK_BYTES, decode_content=False):
                content += block
                if len(content) > max_bytes:
                    raise SourceError(f"the download has more than {max_bytes} bytes")
                bar.update(len(block))
    return bytes(content)


def _reason(error: BaseException) -> str:
    """Return the message of the innermost error: "Connection refused", "timed out", ..."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    # The messages of these classes contain the address, with its password.
    if isinstance(error, (requests.RequestException, urllib3.exceptions.LocationValueError)):
        return type(error).__name__
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def read_members(archive: bytes, names: Collection[str], max_bytes: int) -> dict[str, bytes]:
    """Read members of an untrusted .tgz, each with at most max_bytes.

    Other members are not read. Paths in the archive are not used, links are not followed, and
    sparse files are rejected, so that the content of a malicious archive stays in the archive.

    Raises:
      SourceError: If the archive is corrupt, or if a member is missing or not a regular file.
    """
    contents: dict[str, bytes] = {}
    try:
        with (
            gzip.GzipFile(fileobj=io.BytesIO(archive)) as unzipped,
            tarfile.open(
                fileobj=_LimitedReader(unzipped, _MAX_UNPACKED_BYTES),
                mode="r|",
            ) as tar,
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
                        f"the size of {member.name} in the archive is {member.size} bytes; at most"
                        f" {max_bytes} are expected"
                    )
                contents[name] = tar.extractfile(member).read()
                if len(contents) == len(names):
                    return contents
    # gzip and tarfile raise these for bytes of other formats. BadGzipFile is an OSError. A bad
    # number in a header raises ValueError, and a long chain of headers raises RecursionError.
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, RecursionError) as error:
        raise SourceError(f"not a complete .tgz archive ({error})") from error
    missing = [name for name in names if name not in contents]
    raise SourceError(f"{', '.join(missing)} is not in the archive")


class _LimitedReader:
    """A reader that fails at the first byte beyond a limit."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file, self._max_bytes, self._num_read = file, max_bytes, 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._num_read += len(data)
        if self._num_read > self._max_bytes:
            raise SourceError(f"the archive unpacks to more than {self._max_bytes} bytes")
        return data
