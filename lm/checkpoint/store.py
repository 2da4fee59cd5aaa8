"""The checkpoints of a run on disk: write and find them.

A checkpoint is written under a temporary name, and renamed after all files are on the disk.
Therefore, a directory named step-* is complete, even if the process was killed. Only a disk fault
can corrupt it, and `verify` detects such faults. If a disk fails for a moment, functions that read
raise OSError or RunError, which end the job with exit code 1. See docs/reliability.md.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import tensorflow.compat.v1 as tf

from lm import logger
from lm.checkpoint.manifest import (
    Checkpoint,
    Manifest,
    file_facts,
    list_checkpoints,
    names_of,
    path_of,
    read_manifest,
    verify,
    write_manifest,
)
from lm.checkpoint.tensors import Group, write_tensors
from lm.errors import RunError, UserError
from lm.files import unfinished
from lm.json_files import CorruptFile
from lm.record import CHECKPOINTS_DIR

_TEMPORARY = "tmp-"


def find(run_dir: str, which: str = "last") -> Checkpoint:
    """Return a verified checkpoint of a run. Skip corrupt checkpoints with a warning.

    `which` is "last", "best" by validation perplexity, or the path or the name of a checkpoint.
    """
    if which == "best":
        return _find_best(run_dir)
    if which != "last":
        which = os.fspath(which)
        own = os.path.join(run_dir, CHECKPOINTS_DIR, which)
        # The working directory may contain a checkpoint of a different run with the same name.
        is_name = os.path.basename(os.path.abspath(which)) == which.rstrip("/")
        found = next(filter(os.path.isdir, (own, which) if is_name else (which, own)), None)
        if found is None:
            raise UserError(
                f"{which} does not exist; the checkpoints of {run_dir} are:"
                f" {names_of(run_dir) or 'none'}"
            )
        return verify(found)
    found = find_newest(run_dir)
    if found is None:
        if names := names_of(run_dir):
            raise UserError(f"{run_dir} has only averages: choose one of {names} with --checkpoint")
        raise UserError(f"{run_dir} has no checkpoint")
    return found


def find_newest(run_dir: str) -> Checkpoint | None:
    """Return the newest checkpoint that is not corrupt, or None if a run has no checkpoints."""
    checkpoints = list_checkpoints(run_dir)
    for checkpoint in usable(run_dir, verify, newest_first=True):
        return checkpoint
    if checkpoints:  # Starting over could silently discard days of training.
        raise UserError(
            f"all {len(checkpoints)} checkpoints in {run_dir} are corrupt; restore one from a"
            " backup, or start a new run in a different directory"
        )
    return None


def _find_best(run_dir: str, skipped: Collection[str] = ()) -> Checkpoint:
    readable = usable(run_dir, lambda path: Checkpoint(path, read_manifest(path)))
    manifests = {path: manifest for path, manifest in readable if path not in skipped}
    best = best_of(manifests)
    if best is None:
        raise UserError(f"{run_dir} has no checkpoint with a validation perplexity")
    # Verify only this one, because a checkpoint may have many GB.
    if read_or_skip(best, verify) is None:
        return _find_best(run_dir, {*skipped, best})
    *_, last = manifests.values()
    found = manifests[best].progress.valid_perplexity
    lowest = min(last.progress.valid_perplexities, default=found)
    if lowest < found:  # The checkpoint of the best epoch could not be saved, or is corrupt.
        logger.warning(
            f"the best validation perplexity, {lowest:.2f}, has no usable checkpoint; using step"
            f" {manifests[best].step}, with {found:.2f}"
        )
    return Checkpoint(best, manifests[best])


def best_of(
    manifests: Mapping[str, Manifest], is_intact: Callable[[str], bool] = lambda path: True
) -> str | None:
    """Return the path of the intact checkpoint with the best validation perplexity, or None."""
    newest = max((manifest.step for manifest in manifests.values()), default=None)
    known = {}
    for found, manifest in manifests.items():
        # If --max_steps stopped an earlier job within an epoch, that job validated a step that an
        # uninterrupted run does not validate. Such a step must not decide which weights are best.
        counts = manifest.step in (newest, *manifest.progress.valid_steps)
        if counts and manifest.progress.valid_perplexity:
            known[found] = manifest.progress.valid_perplexity
    return next(filter(is_intact, sorted(known, key=known.get)), None)


def usable(
    run_dir: str, read: Callable[[str], Checkpoint], newest_first: bool = False
) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a run that `read` can read, and skip corrupt checkpoints."""
    done: set[str] = set()
    # List them each time: a run that is still training adds and removes checkpoints.
    while rest := [path for path in list_checkpoints(run_dir) if path not in done]:
        path = rest[-1 if newest_first else 0]
        done.add(path)
        if checkpoint := read_or_skip(path, read):
            yield checkpoint


def read_or_skip(path: str, read: Callable[[str], Checkpoint]) -> Checkpoint | None:
    """Read a checkpoint, or return None if it is corrupt, or if a training run has removed it."""
    # A different version is an error: an older checkpoint must not silently replace it.
    try:
        return read(path)
    except (CorruptFile, RunError) as error:
        if not os.path.lexists(path):  # NFS reports a file that another host removed as stale.
            return None
        if isinstance(error, RunError):
            raise RunError(f"{error}; if this persists, move {path} away to skip it") from error
        logger.warning("skipping a corrupt checkpoint: %s", error)
        return None


def save(
    run_dir: str,
    groups: Iterable[Group],
    manifest: Manifest,
    after_reading: Callable[[], None] = lambda: None,
    after_file: Callable[[], None] = lambda: None,
    known: Manifest | None = None,
    name: str | None = None,
) -> Checkpoint:
    """Write a checkpoint. If the step already has one, update only its manifest.

    The weights of a step never change. Only facts about the weights change, such as the validation
    perplexity. `after_reading` is called when the arrays are no longer needed, and `after_file`
    when a file is on the disk. `known` is the manifest of the step's checkpoint, if this job has
    written or verified it. A checkpoint with another `name` than the default is only found by its
    name.
    """
    parent = os.path.join(run_dir, CHECKPOINTS_DIR)
    final = os.path.join(parent, name) if name else path_of(run_dir, manifest.step)
    # Callers that give no name hold the run's lock. Others may write at the same time.
    unique = f"{name}-{secrets.token_hex(4)}" if name else f"{manifest.step:08d}"
    temporary = os.path.join(parent, f"{_TEMPORARY}{unique}")
    try:
        with contextlib.suppress(CorruptFile):
            known = known or verify(final).manifest
        if known:
            after_reading()
            manifest = dataclasses.replace(manifest, files=known.files)
            write_manifest(final, manifest)
            _fsync(final)
            return Checkpoint(final, manifest)
        # Do not use makedirs: a directory that was unmounted must not be created again.
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent)
            _fsync(run_dir)
        with unfinished(temporary):
            os.mkdir(temporary)
            write_tensors(temporary, groups)
            after_reading()
            files = {}
            for file in sorted(os.listdir(temporary)):
                path = os.path.join(temporary, file)
                _fsync(path)
                files[file] = file_facts(path)
                after_file()
            manifest = dataclasses.replace(manifest, files=files)
            write_manifest(temporary, manifest)
            _fsync(temporary)
            is_first = not list_checkpoints(run_dir)
            _publish(temporary, final)
            if is_first:
                manifest.record.write(run_dir, has_checkpoints=True)  # --resume never starts over
            return Checkpoint(final, manifest)
    except (OSError, tf.errors.OpError) as error:
        reason = error.strerror if isinstance(error, OSError) else _reason(error.message, temporary)
        raise RunError(f"cannot write the checkpoint {final}: {reason}") from error


def _reason(message: str, path: str) -> str:
    """Find "PATH...; No space left on device" in the dozen lines of a TensorFlow error."""
    lines = message.splitlines()
    return next((line.rpartition("; ")[2] for line in lines if line.startswith(path)), lines[0])


def _publish(temporary: str, final: str) -> None:
    if os.path.exists(final):  # It is corrupt.
        remove(final)
    os.rename(temporary, final)
    # A rename survives a power cut only when the parent directory is on the disk.
    _fsync(os.path.dirname(final))


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


def remove(checkpoint: str) -> None:
    """Remove a checkpoint."""
    # Rename first: a kill must not leave half of a directory that looks like a checkpoint.
    parent, name = os.path.split(checkpoint)
    doomed = os.path.join(parent, f"{_TEMPORARY}old-{name}")
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed)


def remove_temporary(run_dir: str) -> None:
    """Remove unfinished checkpoints of killed processes. The caller must hold the run's lock."""
    for path in pathlib.Path(run_dir, CHECKPOINTS_DIR).glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
