"""Fetch one address into one file: retries, time-outs, resuming, a progress bar."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

import requests
import tqdm
import urllib3

from lm.errors import RunError

logger = logging.getLogger("lm")

_BLOCK_BYTES = 1 << 14
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # HTTP answers that another try may better


@dataclass(frozen=True)
class Patience:
    """How long a download waits for a server, and how often it tries again.

    The defaults give up on an address that refuses connections after 3.5 seconds, so that a
    cluster without internet gets its error message soon.
    """

    connect_seconds: float = 4.0
    read_seconds: float = 20.0  # between two blocks of data, not for the whole
    attempts: int = 4
    backoff_seconds: float = 0.5  # doubles after each attempt


PATIENCE = Patience()


class SourceError(Exception):
    """One address did not give the file; the message is one line. Another address may do."""


class _PassingError(SourceError):
    """A failure that may be gone at the next attempt."""


def shown(address: str) -> str:
    """Strip passwords and query (signed links) from an address, for logs and messages."""
    parts = urllib.parse.urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))


@contextlib.contextmanager
def writing(directory: str) -> Iterator[None]:
    """Turn the disk errors of a block (disk full, quota, no permission) into one clear line.

    Raises:
      RunError: Anything in the block raised a plain OSError.
    """
    try:
        yield
    except OSError as error:
        # Errors of the network are no reason to speak of the disk.
        if isinstance(error, (requests.RequestException, urllib3.exceptions.HTTPError)):
            raise
        raise RunError(
            f"cannot write into {directory}: {error.strerror}; free some space, or "
            f"choose another directory with --data_path"
        ) from error


def fetch(url: str, path: str, max_bytes: int, patience: Patience = PATIENCE) -> None:
    """Download an address, going on from what an interrupted download left in the file.

    The content is not checked here: a server may have another file now than at the first part.

    Args:
      url: An http or https address.
      path: The file; what is in it already counts as the first part.
      max_bytes: Refuse anything larger.
      patience: Time-outs and retries.

    Raises:
      SourceError: The address does not give a complete file; what came stays in `path`.
      RunError: The disk is full or not writable.
    """
    started, size_before = time.monotonic(), _size(path)
    for attempt in range(1, patience.attempts + 1):
        try:
            _fetch_once(url, path, max_bytes, patience)
            return
        except (requests.RequestException, urllib3.exceptions.HTTPError, _PassingError) as error:
            reason = _reason(error, patience)
            unreachable = (
                isinstance(error, requests.ConnectionError)
                and time.monotonic() - started > patience.connect_seconds
                and _size(path) == size_before
            )
        if unreachable or attempt == patience.attempts:
            raise SourceError(reason)
        logger.info("%s: %s; trying again", shown(url), reason)
        time.sleep(patience.backoff_seconds * 2 ** (attempt - 1))


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _fetch_once(url: str, path: str, max_bytes: int, patience: Patience) -> None:
    offset = _size(path)
    # Compressed in transit, the file would have other bytes and Content-Length be of no use.
    headers = {"Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    with requests.get(
        url, headers=headers, stream=True, timeout=(patience.connect_seconds, patience.read_seconds)
    ) as response:
        if offset and not _can_resume(response, offset):
            with writing(os.path.dirname(path)):
                os.remove(path)
            raise _PassingError("the download cannot be resumed, it starts over")
        if response.status_code not in (200, 206):
            kind = _PassingError if response.status_code in _BUSY else SourceError
            raise kind(f"HTTP {response.status_code} {response.reason}")
        if response.status_code == 200:  # the whole file, whatever part was asked for
            offset = 0
        length = response.headers.get("Content-Length", "")
        total = offset + int(length) if length.isdigit() else None
        if total is not None and total > max_bytes:
            raise SourceError(f"{total} bytes, where at most {max_bytes} are expected")
        with writing(os.path.dirname(path)), open(path, "ab" if offset else "wb") as file:
            _copy(response, file, offset, total, max_bytes)
    size = os.path.getsize(path)
    if total is not None and size != total:
        raise _PassingError(f"the connection closed after {size} of {total} bytes")


def _can_resume(response: requests.Response, offset: int) -> bool:
    if response.status_code == 206:
        return response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
    return response.status_code != 416  # 416: the part is longer than the server's file


def _copy(
    response: requests.Response, file, offset: int, total: int | None, max_bytes: int
) -> None:
    style = {"unit": "B", "unit_scale": True, "leave": False, "desc": "downloading"}
    # disable=None: no bar where stderr is not a terminal, such as the log of a batch job.
    with tqdm.tqdm(total=total, initial=offset, disable=None, **style) as bar:
        # The raw stream: some servers label a .tgz "Content-Encoding: gzip", and requests would
        # then unpack it.
        for block in response.raw.stream(_BLOCK_BYTES, decode_content=False):
            file.write(block)
            bar.update(len(block))
            if file.tell() > max_bytes:  # a server that sends no Content-Length
                raise SourceError(f"more than the expected {max_bytes} bytes")


def _reason(error: BaseException, patience: Patience) -> str:
    """Find the one useful line in the nested exceptions of requests and urllib3."""
    if isinstance(error, _PassingError):
        return str(error)
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {patience.connect_seconds:g} seconds"
    if isinstance(error, (requests.Timeout, urllib3.exceptions.ReadTimeoutError)):
        return f"no data for {patience.read_seconds:g} seconds"
    reason, cause = type(error).__name__, error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            reason = cause.strerror  # the innermost one wins: "Connection refused"
        elif isinstance(cause, urllib3.exceptions.IncompleteRead):
            reason = "the connection closed too early"
        cause = cause.__cause__ or cause.__context__
    return reason
