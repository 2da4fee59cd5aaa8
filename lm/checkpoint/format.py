"""Checkpoints on disk: write, list, read.

    output_dir/checkpoints/step-00001000/
        model.index, model.data-00000-of-00001   as tf.train.Saver writes them
        manifest.json                             what they are, with their checksums

A checkpoint is written under another name and renamed when all of it is on the disk, so that a
directory called step-* is complete, whatever was killed and when. Only damage to the disk's
content can make it unreadable, and `verify` finds that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
from collections.abc import Mapping
from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from lm import run_files
from lm.checkpoint import manifest as manifests
from lm.checkpoint.manifest import Manifest, average_name
from lm.checkpoint.verification import forget, remember_whole, verify
from lm.errors import RunError

_STEP = "step-"
_NAME = re.compile(_STEP + r"\d+", re.ASCII)
_TEMPORARY = "tmp-"


def list_checkpoints(run_dir: str) -> list[str]:
    """Return the checkpoint directories of a run, oldest first; nothing is verified."""
    parent = checkpoints_dir(run_dir)
    names = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = [name for name in os.listdir(parent) if _NAME.fullmatch(name)]
    # As numbers: a step of nine digits comes after those of eight.
    return [os.path.join(parent, name) for name in sorted(names, key=_step_of)]


def _step_of(name: str) -> int:
    return int(name[len(_STEP) :])


def load_weights(checkpoint_dir: str) -> dict[str, np.ndarray]:
    """Read the trained weights of a checkpoint, by variable name: the average, where there is one.

    Raises:
      RunError: The checkpoint is corrupt.
    """
    arrays, manifest = load_arrays(checkpoint_dir), manifests.read(checkpoint_dir)
    stored = {name: name for name in manifest.weights}
    if manifest.averaged:  # of what is trained; the others, such as fixed embeddings, have none
        averages = {name: average_name(name) for name in stored}
        kept = arrays.keys() - stored.keys()  # one of its weights may have such a name
        stored.update({name: found for name, found in averages.items() if found in kept})
    missing = [name for name in stored.values() if name not in arrays]
    if missing:
        raise RunError(f"{checkpoint_dir} has no {missing[0]}, which its manifest names")
    return {name: arrays[stored_name] for name, stored_name in stored.items()}


def load_arrays(checkpoint_dir: str) -> dict[str, np.ndarray]:
    """Read all that a checkpoint holds: variables, and the recurrent state of all rows.

    Raises:
      RunError: The checkpoint is corrupt.
    """
    try:
        # As bytes: a path need not be UTF-8.
        reader = tf.train.NewCheckpointReader(os.fsencode(os.path.join(checkpoint_dir, "model")))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise RunError(f"{checkpoint_dir} cannot be read: {error}") from error


def checkpoints_dir(run_dir: str) -> str:
    """Return the directory that holds a run's checkpoints."""
    return os.path.join(run_dir, run_files.CHECKPOINTS)


def save(run_dir: str, arrays: Mapping[str, np.ndarray], manifest: Manifest) -> str:
    """Write a checkpoint; one of the same step gets only the new manifest.

    The weights of a step are always the same, so all that can have changed is what is known
    about them, such as their validation perplexity.

    Args:
      run_dir: The run's output_dir, which exists.
      arrays: By name, what the checkpoint holds.
      manifest: Without `files`.

    Returns:
      The checkpoint's directory.

    Raises:
      RunError: It cannot be written; the checkpoints that were there still are.
    """
    parent = checkpoints_dir(run_dir)
    final = os.path.join(parent, f"{_STEP}{manifest.step:08d}")
    temporary = os.path.join(parent, f"{_TEMPORARY}{manifest.step:08d}")
    try:
        files = _files_if_intact(final)
        if files:
            dataclasses.replace(manifest, files=files).write(final)
            _fsync(final)
            remember_whole(final)
            return final
        # Not makedirs: should output_dir have vanished (unmounted), it must not be made anew.
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent)
            _fsync(run_dir)
        shutil.rmtree(temporary, ignore_errors=True)
        os.mkdir(temporary)
        _write_tensors(temporary, arrays)
        _write_manifest(temporary, manifest)
        if not list_checkpoints(run_dir):
            manifest.record.write(run_dir, has_checkpoints=True)  # the run never starts over now
        _publish(temporary, final)
        remember_whole(final)
        return final
    except (OSError, tf.errors.OpError) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # gives its space back
        reason = error.strerror if isinstance(error, OSError) else _reason(error.message, temporary)
        raise RunError(f"cannot write the checkpoint {final}: {reason}") from error


def _reason(message: str, path: str) -> str:
    """Find "PATH...; No space left on device" in the dozen lines that TensorFlow makes of it."""
    lines = message.splitlines()
    return next((line.rpartition("; ")[2] for line in lines if line.startswith(path)), lines[0])


def _files_if_intact(checkpoint_dir: str) -> Optional[Mapping]:
    try:
        return verify(checkpoint_dir).files
    except manifests.Unreadable:
        raise  # it may be whole: this save fails, and the next one sees
    except RunError:
        return None


def _write_tensors(directory: str, arrays: Mapping[str, np.ndarray]) -> None:
    # Threads of its own: this blocks one for as long as the disk takes, and the training's
    # pool, which sessions share, may have no other.
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
    dataclasses.replace(manifest, files=manifests.describe_files(directory)).write(directory)
    _fsync(directory)


def _publish(temporary: str, final: str) -> None:
    damaged = _set_aside(final) if os.path.exists(final) else None
    os.rename(temporary, final)
    # The rename itself is only safe from a power cut once the parent is on the disk.
    _fsync(os.path.dirname(final))
    if damaged:
        shutil.rmtree(damaged, ignore_errors=True)


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Folders that a virtual machine shares, and old SMB, do not know it of directories.
        if error.errno != errno.EINVAL or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def remove(checkpoint_dir: str) -> None:
    """Remove a checkpoint, whole or not at all."""
    # Renamed first: killed in the middle, it must not leave half of what looks like a checkpoint.
    shutil.rmtree(_set_aside(checkpoint_dir), ignore_errors=True)


def _set_aside(checkpoint_dir: str) -> str:
    parent, name = os.path.split(checkpoint_dir)
    doomed = os.path.join(parent, f"{_TEMPORARY}old-{name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(checkpoint_dir, doomed)
    forget(checkpoint_dir)
    return doomed


def remove_temporary(run_dir: str) -> None:
    """Remove what killed processes left half-written; call with the run's lock held."""
    parent = checkpoints_dir(run_dir)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(parent):
            if name.startswith(_TEMPORARY):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
