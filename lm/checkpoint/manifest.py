"""What a checkpoint says about itself: `manifest.json`, which is data and never executed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, Optional

from lm.errors import RunError
from lm.files import sha256_of, write_atomically
from lm.record import RunRecord, from_json, newer_version

NAME = "manifest.json"
_FORMAT = 1
_INDEX = "model.index"
# As tf.train.Saver names its files. Anything else could lead out of the directory.
_FILE_NAME = re.compile(r"model\.[\w.-]+", re.ASCII)
_MOST_BYTES = 1 << 24  # of a manifest, which has a few thousand: none must fill the memory


class Unreadable(RunError):
    """What may be whole cannot be read: a disk or a network fails, perhaps for a moment."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The facts of one checkpoint."""

    step: int  # updates done; also the position in the data and in the schedule
    epoch: int  # of the last update, from 1
    steps_per_epoch: int
    world_size: int
    record: RunRecord
    position: Mapping[str, Any]  # dataclasses.asdict(Position)
    weights: tuple[str, ...]  # names of the trained variables
    valid_perplexity: Optional[float] = None  # of these weights, if it is known
    averaged: bool = False  # True: it holds an average of each weight too, which is the result
    in_sync: bool = True  # False: the ranks' weights had parted, and these are rank 0's
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def write(self, directory: str) -> None:
        """Write manifest.json, whole or not at all.

        Raises:
          OSError: It cannot be written.
        """
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        content["checksum"] = _checksum(content)
        text = json.dumps(content, indent=1) + "\n"
        write_atomically(os.path.join(directory, NAME), text.encode())


def average_name(weight: str) -> str:
    """Return the name of the variable that holds the average of a weight."""
    return f"{weight}/average"


def describe_files(directory: str) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of each file of a checkpoint, by name.

    Raises:
      OSError: A file cannot be read.
    """
    paths = {name: os.path.join(directory, name) for name in sorted(os.listdir(directory))}
    return {
        name: {"bytes": os.path.getsize(path), "sha256": sha256_of(path)}
        for name, path in paths.items()
        if name != NAME
    }


def read(directory: str) -> Manifest:
    """Read the manifest of a checkpoint, without looking at the checkpoint's other files.

    Raises:
      RunError: It is missing or damaged; the message names it and says how.
      Unreadable: It may be whole.
      UserError: A newer version of this program has written it.
    """
    path = os.path.join(directory, NAME)
    content = _read_checked(path)
    # Every later format must keep `format` and `checksum`: only a checksum that fits tells a newer
    # format from a flipped bit.
    number = content.pop("format", None)
    if number != _FORMAT:
        raise newer_version(path, f"format {number}")
    manifest = from_json(Manifest, content, path)
    wrong = _first_wrong(manifest)
    if wrong:
        raise RunError(f"{path} is corrupt: {wrong}")
    return manifest


def _read_checked(path: str) -> dict[str, Any]:
    try:
        size = _plain_size(path)
        if size > _MOST_BYTES:
            raise RunError(f"{path} has {size} bytes, too many for a manifest")
        with open(path, "rb") as file:
            content = json.loads(file.read())
        # A flipped bit in a number is still JSON: only a checksum finds it.
        if content.pop("checksum") != _checksum(content):
            raise ValueError("its checksum does not match")
        return content
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is corrupt: {error}") from error


def _first_wrong(manifest: Manifest) -> Optional[str]:
    """Return what no save writes: the checksum of a manifest that somebody made up fits too."""
    if not all(isinstance(name, str) for name in manifest.weights):
        return "weights must be names"
    for name, described in manifest.files.items():
        if not _FILE_NAME.fullmatch(name):
            return f"files has {name!r}, which is not a file of a checkpoint"
        if not isinstance(described, dict) or not {"bytes", "sha256"} <= described.keys():
            return f"files has no size or SHA-256 of {name!r}"
    return None if _INDEX in manifest.files else f"files has no {_INDEX}"


def check_files(directory: str, manifest: Manifest) -> None:
    """Check that the files of a checkpoint are those that its manifest describes.

    Raises:
      RunError: Names the first file that is not, and how.
      Unreadable: It may be one of them.
    """
    for name, described in manifest.files.items():
        path = os.path.join(directory, name)
        try:
            size = _plain_size(path)
            if size != described["bytes"]:
                raise RunError(f"{path} has {size} bytes instead of {described['bytes']}")
            if sha256_of(path) != described["sha256"]:
                raise RunError(f"{path} is corrupt: its SHA-256 does not match the manifest's")
        except OSError as error:
            raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> RunError:
    is_gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
    kind = RunError if is_gone else Unreadable
    return kind(f"{path} cannot be read: {error.strerror}")


def _plain_size(path: str) -> int:
    """Return a file's size in bytes; a device or a pipe, which has no end, is refused."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise RunError(f"{path} is not a plain file")
    return status.st_size


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
