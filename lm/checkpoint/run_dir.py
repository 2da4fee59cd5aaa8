"""The directory of a run: one job at a time, and never a second run over a first one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import time
from typing import Any, NamedTuple, Optional

from lm.checkpoint import format as checkpoint
from lm.checkpoint import manifest as manifests
from lm.checkpoint.records import load_record, refuse_unknown_fields
from lm.config import Config, RunOptions
from lm.data.corpus import Corpus
from lm.errors import RunError, UserError
from lm.files import write_atomically
from lm.training.progress import Position

logger = logging.getLogger("lm")

# A resumed run may differ in these: nothing that has been trained depends on them.
_MAY_CHANGE = ("name", "num_epochs", "eval_batch_size")
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_locks: list[Any] = []  # open for as long as this process lives


class RunDir(NamedTuple):
    """A directory that this process alone may write to, and where its run goes on."""

    path: str
    checkpoint_dir: Optional[str]  # to resume from; None starts afresh
    position: Position


def open_run_dir(config: Config, options: RunOptions, corpus: Corpus) -> RunDir:
    """Make and lock the directory of a run, and with --resume find where it goes on.

    Args:
      config: What is to be trained.
      options: `output_dir` and `resume`.
      corpus: What it is to be trained on.

    Raises:
      UserError: It cannot be written, it holds a run already, or what it holds cannot be resumed.
      RunError: Another job uses it.
    """
    if options.resume and not options.output_dir:
        raise UserError("--resume needs --output_dir, the directory of the run to continue")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = options.output_dir or os.path.join("runs", f"{config.name}-{stamp}")
    _make(path)
    _lock(path)
    if not options.resume:
        if checkpoint.list_checkpoints(path) or os.path.exists(_metrics(path)):
            raise UserError(
                f"output_dir {path} already holds a run: continue it with --resume, or choose"
                " another one"
            )
        return RunDir(path, None, Position())
    checkpoint.remove_temporary(path)
    checkpoint_dir = checkpoint.newest(path)
    position = Position()
    if checkpoint_dir:
        manifest = manifests.read(checkpoint_dir)
        source = os.path.join(checkpoint_dir, manifests.NAME)
        refuse_unknown_fields(Config, manifest.config, source)
        _check_fits(manifest, config, corpus)
        if not manifest.in_sync:
            logger.warning(
                "%s was saved when the ranks' weights had parted: all ranks go on with rank 0's;"
                " to go on from an older checkpoint, move it away",
                checkpoint_dir,
            )
        position = load_record(Position, manifest.position, source)
    _forget_events_after(path, position)
    return RunDir(path, checkpoint_dir, position)


def _make(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
        # Found out now, not after the first epoch.
        probe = os.path.join(path, ".writable")
        with open(probe, "w"):
            os.remove(probe)
    except OSError as error:
        raise UserError(f"cannot write to output_dir {path}: {error}") from error


def _lock(path: str) -> None:
    # The kernel frees it when this process ends, however it ends: no stale lock can stay.
    file = open(os.path.join(path, ".lock"), "ab")
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # Not a UserError: after a crash it may be the last of the old job, and pass.
        raise RunError(f"another job is using output_dir {path}") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s is on a file system without locks: start no second job in it", path)
    _locks.append(file)


def _check_fits(manifest: manifests.Manifest, config: Config, corpus: Corpus) -> None:
    # A field that the checkpoint does not know is newer: the run was trained without.
    before = {**dataclasses.asdict(Config()), **manifest.config}
    for name, value in dataclasses.asdict(config).items():
        if name not in _MAY_CHANGE and value != before[name]:
            raise UserError(
                f"cannot resume: {name} was {before[name]!r} in this run and is {value!r} now; to"
                " train on with other settings, start a new run with --init_from"
            )
    if manifest.vocabulary != corpus.vocabulary.checksum:
        raise UserError("cannot resume: the vocabulary is not the one that this run began with")
    if manifest.corpus != corpus.checksum:
        raise UserError(
            "cannot resume: the corpus is not the one that this run began with; give its directory"
            " with --data_path"
        )


def _forget_events_after(path: str, position: Position) -> None:
    """Remove the events of steps that will be done again; each is then there exactly once."""
    with contextlib.suppress(FileNotFoundError), open(_metrics(path), "rb") as file:
        kept = [line for line in file if _is_before(line, position)]
        write_atomically(_metrics(path), b"".join(kept))


def _is_before(line: bytes, position: Position) -> bool:
    try:
        event = json.loads(line)
        if event["event"] == "epoch":
            return event["epoch"] <= position.epochs_done
        return event["event"] != "test" and event.get("step", 0) <= position.step
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # cut off when the job was killed


def _metrics(path: str) -> str:
    return os.path.join(path, "metrics.jsonl")
