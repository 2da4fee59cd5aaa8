"""The directory of a run: one job at a time, and never a second run over a first one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import tempfile
import time
from typing import NamedTuple, Optional

from lm import run_files
from lm.checkpoint import choice
from lm.checkpoint import format as checkpoint
from lm.checkpoint import manifest as manifests
from lm.checkpoint.records import refuse_unknown_fields
from lm.config import NOT_OF_STEPS, Config
from lm.errors import RunError, UserError, error_class
from lm.files import locked, write_atomically
from lm.options import defaults

logger = logging.getLogger("lm")

# In what a resumed run may differ: in eval_batch_size as long as perplexities decide nothing, which
# would be of rows that are cut otherwise.
MAY_CHANGE = NOT_OF_STEPS | {"eval_batch_size"}


class Identity(NamedTuple):
    """What must be the same for a run to go on."""

    config: Config
    vocabulary: str  # checksums
    corpus: str
    config_file: Optional[str] = None  # where it is part of the run
    may_change: bool = False  # whether another config file is taken for the same
    ends_by_validation: bool = False  # whether its perplexities decide when to end, or what to test


class RunDir(NamedTuple):
    """A directory that this process alone may write to, and where its run goes on."""

    path: str
    checkpoint_dir: Optional[str]  # to resume from; None starts afresh

    def forget_after(self, step: int, epochs_done: int) -> None:
        """Have each event and each checkpoint of the steps that will be done again exactly once.

        Raises:
          RunError: A checkpoint that could not be read is still in its place.
        """
        if self.checkpoint_dir:
            choice.set_aside_unread(self.path, self.checkpoint_dir)
        path = _metrics(self.path)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            lines = file.readlines()
            kept = [line for line in lines if _is_before(line, step, epochs_done)]
            if len(kept) < len(lines):
                write_atomically(path, b"".join(kept))


def open_run_dir(
    identity: Identity, output_dir: Optional[str], resume: bool, stack: contextlib.ExitStack
) -> RunDir:
    """Make and lock the directory of a run, and if it is resumed find where it goes on.

    Args:
      identity: What is to be trained.
      output_dir: The directory; None makes a new one in runs/.
      resume: Whether to go on from the newest checkpoint, if there is one.
      stack: Frees the directory when it is closed.

    Raises:
      UserError: It cannot be written, it holds a run already, or what it holds cannot be resumed.
      RunError: Another job uses it, or it fails in a way that may pass.
    """
    if resume and not output_dir:
        raise UserError("--resume needs --output_dir, the directory of the run to continue")
    path = _make(output_dir, identity.config.name)
    if not output_dir:
        stack.callback(_remove_unused, path)
    try:
        stack.enter_context(locked(os.path.join(path, run_files.LOCK)))
    except BlockingIOError:
        # Not a UserError: after a crash it may be the last of the old job, and pass.
        raise RunError(f"another job is using output_dir {path}") from None
    if not resume:
        if checkpoint.list_checkpoints(path) or os.path.exists(_metrics(path)):
            raise UserError(
                f"output_dir {path} already holds a run: continue it with --resume, or choose"
                " another one"
            )
        return RunDir(path, None)
    checkpoint.remove_temporary(path)
    checkpoint_dir = choice.newest(path)
    if checkpoint_dir:
        _check_resumable(checkpoint_dir, identity)
        checkpoint.mark_as_saved(path)  # also of an older version, or copied without
    else:
        _check_new(path)
    return RunDir(path, checkpoint_dir)


def _make(output_dir: Optional[str], name: str) -> str:
    path = output_dir or os.path.join("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    for place in (os.path.join(path, run_files.CHECKPOINTS), path, *pathlib.Path(path).parents):
        if os.path.islink(place) and not os.path.exists(place):
            raise RunError(f"{place} leads nowhere: mount what it is on, or remove it")
    try:
        if output_dir:
            os.makedirs(path, exist_ok=True)
        else:
            path = _make_new(path)
        for place in filter(os.path.exists, (path, os.path.join(path, run_files.CHECKPOINTS))):
            tempfile.TemporaryFile(dir=place).close()  # found out now, not after the first epoch
    except OSError as error:
        raise error_class(error)(f"cannot write to output_dir {path}: {error.strerror}") from error
    return path


def _make_new(stem: str) -> str:
    """Make a directory that no other run has, also of those that start in the same second."""
    path, number = stem, 1
    while True:
        try:
            os.makedirs(path)
            return path
        except FileExistsError:
            number += 1
            path = f"{stem}-{number}"


def _remove_unused(path: str) -> None:
    """Remove the new directory of a run that could not start."""
    with contextlib.suppress(OSError):
        if os.listdir(path) == [run_files.LOCK]:
            os.remove(os.path.join(path, run_files.LOCK))
            os.rmdir(path)


def _check_new(path: str) -> None:
    """Do not take for a run that has yet to begin one whose checkpoints cannot be seen.

    Raises:
      RunError: It is one; a disk that is not mounted may come back.
    """
    if os.path.exists(os.path.join(path, run_files.SAVED)):
        raise RunError(
            f"{path} has had checkpoints, and has none now: put them back, or remove"
            f" {run_files.SAVED} there to start again"
        )


def _check_resumable(checkpoint_dir: str, identity: Identity) -> None:
    manifest = manifests.read(checkpoint_dir)
    source = os.path.join(checkpoint_dir, manifests.NAME)
    _check_config_file(manifest, identity)
    by_file = identity.config_file is not None
    refuse_unknown_fields(type(identity.config), manifest.config, source, by_file)
    _check_fits(manifest, identity)
    if not manifest.in_sync:
        logger.warning(
            "%s was saved when the ranks' weights had parted: all ranks go on with rank 0's;"
            " to go on from an older checkpoint, move it away",
            checkpoint_dir,
        )


def _check_config_file(manifest: manifests.Manifest, identity: Identity) -> None:
    if manifest.config_file != identity.config_file and not identity.may_change:
        raise UserError(
            "cannot resume: the config file is not the one that this run began with, and brings its"
            " network or fields; if it still means the same, say so with --allow_changed_network"
        )


def _check_fits(manifest: manifests.Manifest, identity: Identity) -> None:
    # A field that the checkpoint does not know is newer: the run was trained without.
    before = {**defaults(type(identity.config)), **manifest.config}
    follows = identity.config.follows_validation or identity.ends_by_validation
    may_change = NOT_OF_STEPS if follows else MAY_CHANGE
    for name, value in dataclasses.asdict(identity.config).items():
        if name not in may_change and value != before[name]:
            raise UserError(
                f"cannot resume: {name} was {before[name]!r} in this run and is {value!r} now; to"
                " train on with other settings, start a new run with --init_from"
            )
    if manifest.vocabulary != identity.vocabulary:
        raise UserError("cannot resume: the vocabulary is not the one that this run began with")
    if manifest.corpus != identity.corpus:
        raise UserError(
            "cannot resume: the corpus is not the one that this run began with; give its directory"
            " with --data_path"
        )


def _is_before(line: bytes, step: int, epochs_done: int) -> bool:
    if not line.endswith(b"\n"):  # cut off when the job was killed
        return False
    try:
        event = json.loads(line)
        if event["event"] == "epoch":
            return event["epoch"] <= epochs_done
        return event["event"] not in ("test", "end") and event.get("step", 0) <= step
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # no event


def _metrics(path: str) -> str:
    return os.path.join(path, run_files.METRICS)
