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
from lm.config import Config, RunOptions
from lm.errors import RunError, UserError, error_class
from lm.files import locked, write_atomically
from lm.options import defaults, may_change
from lm.record import CONFIG_FILE, Difference, RunRecord, first_difference, has_checkpoints

logger = logging.getLogger("lm")


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
    config: Config, options: RunOptions, record: RunRecord, stack: contextlib.ExitStack
) -> RunDir:
    """Create and lock the directory of a run; if the run is resumed, find its newest checkpoint.

    Args:
      config: The config of the run.
      options: `output_dir`, which is a new directory in runs/ by default, and `resume`.
      record: The identity of the run, which a resumed run must share.
      stack: Releases the directory when it is closed.

    Raises:
      UserError: It cannot be written, it holds a run already, or what it holds cannot be resumed.
      RunError: Another job uses it, or it fails in a way that may pass.
    """
    output_dir, resume = options.output_dir, options.resume
    if resume and not output_dir:
        raise UserError("--resume needs --output_dir, the directory of the run to continue")
    path = _make(output_dir, config.name)
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
        _check_resumable(checkpoint_dir, config, options, record)
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
    if has_checkpoints(path):
        raise RunError(
            f"{path} has had checkpoints, and has none now: put them back, or remove"
            f" {run_files.RUN} there to start again"
        )


def _check_resumable(
    checkpoint_dir: str, config: Config, options: RunOptions, record: RunRecord
) -> None:
    manifest = manifests.read(checkpoint_dir)
    # A field that the class has got since then had its default.
    begun = {**defaults(type(config)), **manifest.record.config}
    before = dataclasses.replace(manifest.record, config=begun)
    decides = config.follows_validation or options.follows_validation
    ignored = may_change(Config, "resume", *([] if decides else ["evaluate"]))
    if options.allow_changed_config_file:
        ignored.add(CONFIG_FILE)
    difference = first_difference(before, record, ignored)
    if difference:
        raise UserError(f"cannot resume: {_explain(difference, record)}")
    if not manifest.in_sync:
        logger.warning(
            "%s was saved when the ranks' weights had diverged: all ranks continue with the weights"
            " of rank 0; to continue from an older checkpoint, move this one away",
            checkpoint_dir,
        )


def _explain(difference: Difference, record: RunRecord) -> str:
    name, before, now = difference
    if name not in record.facts:
        return (
            f"this run has the setting {name}, which neither this version of the program nor its"
            " config file knows: update the program, or define that field again"
        )
    if name == CONFIG_FILE:
        return (
            "the config file, which defines a network or fields, has changed since this run began;"
            " if it still means the same, add --allow_changed_config_file"
        )
    if name == "vocabulary":
        return "the vocabulary is not the one that this run began with"
    if name == "corpus":
        return (
            "the corpus is not the one that this run began with; give its directory with"
            " --data_path"
        )
    return (
        f"{name} was {before!r} in this run and is {now!r} now; to train with different settings,"
        " start a new run with --init_from"
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
