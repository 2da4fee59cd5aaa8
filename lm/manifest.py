"""What a checkpoint says about itself: `manifest.json`, which is data and never executed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, Optional

from lm.errors import RunError
from lm.files import sha256_of, write_atomically

NAME = "manifest.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The facts of one checkpoint."""

    step: int  # updates done; also the position in the data and in the schedule
    epoch: int  # of the last update, from 1
    steps_per_epoch: int
    world_size: int
    seed: int
    config: Mapping[str, Any]  # dataclasses.asdict(Config)
    vocabulary: str  # SHA-256 of vocabulary.txt
    corpus: str  # SHA-256 of the corpus
    position: Mapping[str, Any]  # dataclasses.asdict(Position)
    weights: tuple[str, ...]  # names of the trained variables
    valid_perplexity: Optional[float] = None  # of these weights, if it is known
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
    """
    path = os.path.join(directory, NAME)
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
        # A flipped bit in a number is still JSON: only a checksum finds it.
        if content.pop("checksum") != _checksum(content):
            raise ValueError("its checksum does not match")
        if content.pop("format") != _FORMAT:
            raise ValueError("it is of another version of this program")
        content["weights"] = tuple(content["weights"])
        return Manifest(**content)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}") from error


def check_files(directory: str, manifest: Manifest) -> None:
    """Check that the files of a checkpoint are those that its manifest describes.

    Raises:
      RunError: Names the first file that is not, and how.
    """
    for name, described in manifest.files.items():
        path = os.path.join(directory, name)
        try:
            size = os.path.getsize(path)
            if size != described["bytes"]:
                raise RunError(f"{path} has {size} bytes instead of {described['bytes']}")
            if sha256_of(path) != described["sha256"]:
                raise RunError(f"{path} is damaged: its SHA-256 does not match the manifest's")
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from error


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
