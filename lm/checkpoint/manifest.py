"""The files of one checkpoint, which its manifest lists and identifies."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lm.checkpoint.progress import TrainProgress
from lm.errors import RunError, UserError
from lm.files import sha256_of
from lm.json_files import CorruptFile, different_version, from_json, read_object, write_json
from lm.record import CHECKPOINTS_DIR, RunRecord

MANIFEST = "manifest.json"
_FORMAT = 3
_MODEL_FILE = re.compile(r"model\.(index|data-\d{5}-of-\d{5})")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The facts of one checkpoint."""

    world_size: int
    record: RunRecord
    progress: TrainProgress
    weights: tuple[str, ...]  # names of the network's variables
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> int:
        """The number of updates."""
        return self.progress.step


class Checkpoint(NamedTuple):
    """A checkpoint whose files matched its manifest."""

    path: str  # directory
    manifest: Manifest


def list_checkpoints(run_dir: str) -> list[str]:
    """Return the checkpoint directories of a run, oldest first, without verifying them."""
    parent, names = os.path.join(run_dir, CHECKPOINTS_DIR), []
    # Other errors mean that the disk fails.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(parent)
    paths = [os.path.join(parent, name) for name in names]
    steps = {path: step for path in paths if (step := _step_of(path)) is not None}
    # Sort by number: a step of nine digits comes after the steps of eight digits.
    return sorted(steps, key=steps.get)


def path_of(run_dir: str, step: int) -> str:
    """Return the directory of a step's checkpoint."""
    return os.path.join(run_dir, CHECKPOINTS_DIR, f"step-{step:08d}")


def _step_of(checkpoint: str) -> int | None:
    """Return the step in the name of a checkpoint, or None if the name has no step."""
    match = re.fullmatch(r"step-(\d+)", os.path.basename(os.path.normpath(checkpoint)))
    return int(match[1]) if match else None


def names_of(run_dir: str) -> str:
    """Return the names of the checkpoints and averages of a run, for messages."""
    averages = sorted(pathlib.Path(run_dir, CHECKPOINTS_DIR).glob("average-*"))
    return ", ".join(map(os.path.basename, [*list_checkpoints(run_dir), *averages]))


def verify(path: str, after_file: Callable[[], None] = lambda: None) -> Checkpoint:
    """Return the checkpoint in a directory after comparing every file with the manifest.

    `after_file` is called after each file.

    Raises:
      CorruptFile: If a file is missing or corrupt.
      RunError: If a file cannot be read, perhaps only for a moment.
      UserError: If a different version of this program wrote the checkpoint.
    """
    manifest = read_manifest(path)
    if "model.index" not in manifest.files or not all(map(_MODEL_FILE.fullmatch, manifest.files)):
        names = ", ".join(manifest.files) or "no files"
        raise CorruptFile(f"{os.path.join(path, MANIFEST)} names {names}")
    for name, expected in manifest.files.items():
        file = os.path.join(path, name)
        try:
            facts = file_facts(file)
        except FileNotFoundError as error:
            raise CorruptFile(f"{file} is missing") from error
        except OSError as error:
            raise RunError(f"cannot read {file}: {error.strerror}") from error
        if facts != expected:
            raise CorruptFile(f"{file} is corrupt: its size or its SHA-256 differs from {MANIFEST}")
        after_file()
    return Checkpoint(path, manifest)


def read_manifest(checkpoint: str) -> Manifest:
    """Read the manifest of a checkpoint without verifying the other files."""
    path = os.path.join(checkpoint, MANIFEST)
    content = read_object(path)
    if content is None:
        if names := names_of(checkpoint):
            raise UserError(f"{checkpoint} is a run: choose one of its checkpoints ({names})")
        raise CorruptFile(f"{path} is missing")
    if content.pop("checksum", None) != checksum(content):
        raise CorruptFile(f"{path} is corrupt: checksum mismatch")
    # Every later format must keep `format` and `checksum`. A valid checksum distinguishes another
    # format from a flipped bit.
    number = content.pop("format", None)
    if number != _FORMAT:
        raise different_version(path, f"format {number}")
    manifest = from_json(Manifest, content, path)
    manifest = dataclasses.replace(manifest, record=manifest.record.upgraded())
    named = _step_of(checkpoint)
    if named not in (None, manifest.step):  # The directory was renamed.
        raise CorruptFile(f"{checkpoint} contains step {manifest.step}: rename it accordingly")
    return manifest


def file_facts(path: str) -> dict[str, Any]:
    """Return the facts of a file in a manifest."""
    return {"bytes": os.path.getsize(path), "sha256": sha256_of(path)}


def checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum of the content of a manifest."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def write_manifest(directory: str, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint whose other files are complete."""
    content = {"format": _FORMAT, **dataclasses.asdict(manifest)}
    content["checksum"] = checksum(content)
    write_json(os.path.join(directory, MANIFEST), content)
