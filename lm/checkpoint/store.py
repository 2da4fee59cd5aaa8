"""The checkpoints of a run on disk: write, verify, find, read and prune them.

    output_dir/checkpoints/step-00001000/
        model.index, model.data-00000-of-00001   the arrays, in the format of tf.train.Saver
        manifest.json                             the facts, with a checksum of each file

A checkpoint is written under a temporary name, and renamed after all files are on the disk.
Therefore, a directory named step-* is complete, even if the process was killed. Only a disk fault
can corrupt it, and `verify` detects such faults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm.errors import ProgramExit, RunError, UserError
from lm.files import sha256_of, write_atomically
from lm.record import CHECKPOINTS_DIR, RunRecord, different_version, from_json

logger = logging.getLogger("lm")

MANIFEST = "manifest.json"
_FORMAT = 2
_FILE_NAME = re.compile(r"model\.[\w.-]+", re.ASCII)  # rejects names that contain a path
_MAX_MANIFEST_BYTES = 1 << 24  # a manifest has a few thousand bytes
_STEP = "step-"
_STEP_NAME = re.compile(_STEP + r"\d+", re.ASCII)
_TEMPORARY = "tmp-"


class CorruptCheckpoint(RunError):
    """A file of a checkpoint is missing or corrupt."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The facts of one checkpoint."""

    step: int  # number of updates
    world_size: int
    record: RunRecord
    progress: Mapping[str, Any]  # dataclasses.asdict(TrainProgress)
    weights: tuple[str, ...]  # names of the network's variables
    valid_perplexity: float | None = None  # validation perplexity of these weights, if known
    has_average: bool = False  # whether the average of each trained weight is stored too
    in_sync: bool = True  # False: the ranks had diverged, and these are the weights of rank 0
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def write(self, directory: str) -> None:
        """Write manifest.json atomically.

        Raises:
          OSError: If the file cannot be written.
        """
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        content["checksum"] = _checksum(content)
        text = json.dumps(content, indent=1) + "\n"
        write_atomically(os.path.join(directory, MANIFEST), text.encode())


def average_name(weight: str) -> str:
    """Return the name of the variable that holds the average of a weight."""
    return f"{weight}/average"


def list_checkpoints(run_dir: str) -> list[str]:
    """Return the checkpoint directories of a run, oldest first, without verifying them."""
    parent, names = checkpoints_dir(run_dir), []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = [name for name in os.listdir(parent) if _STEP_NAME.fullmatch(name)]
    # Sort by number: a step of nine digits comes after the steps of eight digits.
    return [
        os.path.join(parent, name) for name in sorted(names, key=lambda n: int(n[len(_STEP) :]))
    ]


def checkpoints_dir(run_dir: str) -> str:
    """Return the directory of a run's checkpoints."""
    return os.path.join(run_dir, CHECKPOINTS_DIR)


def find(run_dir: str, which: str = "last") -> str:
    """Return a verified checkpoint of a run. Skip corrupt checkpoints with a warning.

    `which` is "last", "best" by validation perplexity, or the path of a checkpoint.

    Raises:
      UserError: If the checkpoint is missing or corrupt, or if a different version of this program
        wrote it. In the last case, an older checkpoint must not silently replace it.
      RunError: If a checkpoint cannot be read. A disk or a network may recover.
    """
    if which == "best":
        return _find_best(run_dir)
    if which != "last":
        return check(which)
    found = find_newest(run_dir)
    if found is None:
        raise UserError(f"{run_dir} has no checkpoint")
    return found


def check(checkpoint: str) -> str:
    """Verify a checkpoint that the user named, and return it.

    Raises:
      UserError, RunError: See `find`.
    """
    try:
        verify(checkpoint)
    except CorruptCheckpoint as error:
        raise UserError(f"{checkpoint} is not a usable checkpoint: {error}") from error
    return checkpoint


def find_newest(run_dir: str) -> str | None:
    """Return the newest checkpoint that is not corrupt, or None if a run has no checkpoints.

    Raises:
      UserError, RunError: See `find`.
    """
    checkpoints = list_checkpoints(run_dir)
    found = _first_intact(reversed(checkpoints))
    if checkpoints and found is None:
        # Starting over could silently discard days of training.
        raise UserError(f"all {len(checkpoints)} checkpoints in {run_dir} are corrupt")
    return found


def _find_best(run_dir: str) -> str:
    manifests = {}
    for checkpoint in list_checkpoints(run_dir):
        with _warn_if_corrupt():
            manifests[checkpoint] = read_manifest(checkpoint)
    found = _first_intact(_by_perplexity(manifests))
    if found is None:
        raise UserError(f"{run_dir} has no checkpoint with a validation perplexity")
    # The checkpoint of the best epoch may be missing or corrupt.
    *_, last = manifests.values()
    best = min(filter(math.isfinite, last.progress.get("valid_perplexities", ())), default=math.inf)
    if best < manifests[found].valid_perplexity:
        logger.warning(
            "the epoch with the best validation perplexity, %.2f, has no usable checkpoint; using"
            " step %d, with %.2f",
            best,
            manifests[found].step,
            manifests[found].valid_perplexity,
        )
    return found


def _first_intact(checkpoints: Iterable[str]) -> str | None:
    for checkpoint in checkpoints:
        with _warn_if_corrupt():
            verify(checkpoint)
            return checkpoint
    return None


@contextlib.contextmanager
def _warn_if_corrupt() -> Iterator[None]:
    try:
        yield
    except CorruptCheckpoint as error:
        logger.warning("skipping a corrupt checkpoint: %s", error)


def _by_perplexity(manifests: Mapping[str, Manifest]) -> list[str]:
    """Return the checkpoints with a known validation perplexity, best first."""
    known = []
    for checkpoint, manifest in manifests.items():
        perplexity = manifest.valid_perplexity
        if perplexity is not None and math.isfinite(perplexity):
            known.append((perplexity, checkpoint))
    return [checkpoint for _, checkpoint in sorted(known)]


def prune(run_dir: str, keep: int, verified: MutableMapping[str, Manifest | None]) -> None:
    """Remove old checkpoints, except the last `keep` and the best by validation perplexity.

    Only intact checkpoints count. A checkpoint is removed only if it is older than `keep` intact
    checkpoints, so corrupt checkpoints never displace intact checkpoints. Checkpoints saved after
    the ranks diverged displace only checkpoints of the same kind, because users may not want them.

    `verified` contains the manifest of each checkpoint that this job wrote or verified; None means
    that the checkpoint is corrupt. This function verifies the remaining checkpoints and adds their
    manifests.

    Raises:
      UserError, RunError: If a checkpoint cannot be read. In this case, all checkpoints are kept.
    """
    checkpoints = list_checkpoints(run_dir)
    for checkpoint in checkpoints:
        if checkpoint not in verified:
            verified[checkpoint] = None
            with _warn_if_corrupt():
                verified[checkpoint] = verify(checkpoint)
    intact = {found: verified[found] for found in checkpoints if verified[found]}
    in_sync = [found for found, manifest in intact.items() if manifest.in_sync]
    diverged = [found for found, manifest in intact.items() if not manifest.in_sync]
    old = diverged[:-keep]
    if len(in_sync) >= keep:
        old += checkpoints[: checkpoints.index(in_sync[-keep])]
    for checkpoint in set(old) - set(_by_perplexity(intact)[:1]):
        with contextlib.suppress(OSError):
            _remove(checkpoint)


def verify(checkpoint: str) -> Manifest:
    """Compare every file of a checkpoint with its manifest, and return the manifest.

    Raises:
      CorruptCheckpoint: If a file is missing or corrupt.
      RunError: If a file cannot be read.
      UserError: If a different version of this program wrote the checkpoint.
    """
    manifest = read_manifest(checkpoint)
    for name, facts in manifest.files.items():
        path = os.path.join(checkpoint, name)
        with _reading(path):
            size = _plain_size(path)
            if size != facts["bytes"]:
                raise CorruptCheckpoint(f"{path} has {size} bytes instead of {facts['bytes']}")
            if sha256_of(path) != facts["sha256"]:
                raise ValueError("SHA-256 mismatch")
    return manifest


def read_manifest(checkpoint: str) -> Manifest:
    """Read the manifest of a checkpoint without verifying the other files.

    Raises:
      CorruptCheckpoint, RunError, UserError: See `verify`.
    """
    path = os.path.join(checkpoint, MANIFEST)
    with _reading(path):
        if _plain_size(path) > _MAX_MANIFEST_BYTES:
            raise ValueError("the file is too large")
        with open(path, "rb") as file:
            content = json.loads(file.read())
        if content.pop("checksum") != _checksum(content):
            raise ValueError("checksum mismatch")
    # Every later format must keep `format` and `checksum`. A valid checksum distinguishes another
    # format from a flipped bit.
    number = content.pop("format", None)
    if number != _FORMAT:
        raise different_version(path, f"format {number}")
    try:
        manifest = from_json(Manifest, content, path)
    except RunError as error:
        raise CorruptCheckpoint(str(error)) from error
    with _reading(path):
        for name, facts in manifest.files.items():
            if not _FILE_NAME.fullmatch(name) or not {"bytes", "sha256"} <= facts.keys():
                raise ValueError(f"invalid entry {name!r} in files")
    return manifest


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Raise errors as one line. A missing file is corruption; other OSErrors may be temporary."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except ProgramExit:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is corrupt: {error}") from error


def _plain_size(path: str) -> int:
    """Return the size of a file in bytes. Reject devices and pipes, which may have no end."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a plain file")
    return status.st_size


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def load_arrays(checkpoint: str) -> dict[str, np.ndarray]:
    """Read the contents of a checkpoint: variables, and the recurrent state of all rows.

    Raises:
      RunError: If the checkpoint cannot be read.
    """
    try:
        # Pass bytes, because the path may not be valid UTF-8.
        reader = tf.train.NewCheckpointReader(os.fsencode(os.path.join(checkpoint, "model")))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise RunError(f"{checkpoint} cannot be read: {error}") from error


def load_weights(checkpoint: str) -> dict[str, np.ndarray]:
    """Read the weights of a checkpoint by variable name; averages if the checkpoint has them.

    Raises:
      RunError: If the checkpoint cannot be read.
    """
    arrays, manifest = load_arrays(checkpoint), read_manifest(checkpoint)
    weights = {}
    for name in manifest.weights:
        average = average_name(name)
        # Weights that are not trained have no average. A weight may have the name of an average.
        use_average = manifest.has_average and average in arrays.keys() - {*manifest.weights}
        stored = average if use_average else name
        if stored not in arrays:
            raise RunError(f"{checkpoint} has no {stored}, which its manifest names")
        weights[name] = arrays[stored]
    return weights


def save(run_dir: str, arrays: Mapping[str, np.ndarray], manifest: Manifest) -> str:
    """Write a checkpoint. If the step already has one, update only its manifest.

    The weights of a step never change. Only facts about the weights change, such as the validation
    perplexity.

    Raises:
      RunError: If the checkpoint cannot be written. Older checkpoints stay intact.
    """
    parent = checkpoints_dir(run_dir)
    final = os.path.join(parent, f"{_STEP}{manifest.step:08d}")
    temporary = os.path.join(parent, f"{_TEMPORARY}{manifest.step:08d}")
    try:
        with contextlib.suppress(CorruptCheckpoint):
            dataclasses.replace(manifest, files=verify(final).files).write(final)
            _fsync(final)
            return final
        # Do not use makedirs: a directory that was unmounted must not be created again.
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent)
            _fsync(run_dir)
        shutil.rmtree(temporary, ignore_errors=True)
        os.mkdir(temporary)
        _write_tensors(temporary, arrays)
        _write_manifest(temporary, manifest)
        if not list_checkpoints(run_dir):
            manifest.record.write(run_dir, has_checkpoints=True)  # --resume never starts over
        _publish(temporary, final)
        return final
    except (OSError, tf.errors.OpError) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # frees its space
        reason = error.strerror if isinstance(error, OSError) else _reason(error.message, temporary)
        raise RunError(f"cannot write the checkpoint {final}: {reason}") from error


def _reason(message: str, path: str) -> str:
    """Find "PATH...; No space left on device" in the dozen lines of a TensorFlow error."""
    lines = message.splitlines()
    return next((line.rpartition("; ")[2] for line in lines if line.startswith(path)), lines[0])


def _write_tensors(directory: str, arrays: Mapping[str, np.ndarray]) -> None:
    # Use separate threads: this blocks one thread for as long as the disk takes, and the thread
    # pool of the training, which sessions share, may have only one.
    config = tf.ConfigProto(
        device_count={"GPU": 0},
        use_per_session_threads=True,
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=1,
    )
    with tf.Graph().as_default() as graph:
        placeholders = [tf.placeholder(array.dtype, array.shape) for array in arrays.values()]
        save_op = tf.raw_ops.SaveV2(
            prefix=os.fsencode(os.path.join(directory, "model")),
            tensor_names=list(arrays),
            shape_and_slices=[""] * len(arrays),
            tensors=placeholders,
        )
        with tf.Session(graph=graph, config=config) as session:
            session.run(save_op, dict(zip(placeholders, arrays.values())))
    for name in os.listdir(directory):
        _fsync(os.path.join(directory, name))


def _write_manifest(directory: str, manifest: Manifest) -> None:
    files = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        files[name] = {"bytes": os.path.getsize(path), "sha256": sha256_of(path)}
    dataclasses.replace(manifest, files=files).write(directory)
    _fsync(directory)


def _publish(temporary: str, final: str) -> None:
    corrupt = _set_aside(final) if os.path.exists(final) else None
    os.rename(temporary, final)
    # A rename survives a power cut only when the parent directory is on the disk.
    _fsync(os.path.dirname(final))
    if corrupt:
        shutil.rmtree(corrupt, ignore_errors=True)


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Shared folders of virtual machines and old SMB cannot do this for directories.
        if error.errno != errno.EINVAL or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def _remove(checkpoint: str) -> None:
    # Rename first: a kill must not leave half of a directory that looks like a checkpoint.
    shutil.rmtree(_set_aside(checkpoint), ignore_errors=True)


def _set_aside(checkpoint: str) -> str:
    parent, name = os.path.split(checkpoint)
    doomed = os.path.join(parent, f"{_TEMPORARY}old-{name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(checkpoint, doomed)
    return doomed


def remove_temporary(run_dir: str) -> None:
    """Remove unfinished checkpoints of killed processes. The caller must hold the run's lock."""
    parent = checkpoints_dir(run_dir)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(parent):
            if name.startswith(_TEMPORARY):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
