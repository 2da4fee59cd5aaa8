"""The directory of a run: used by one job at a time, and never by a second run."""

import contextlib
import functools
import itertools
import os
import pathlib
import tempfile
import time
from typing import NamedTuple

from lm import logger
from lm.checkpoint import store
from lm.checkpoint.manifest import Checkpoint
from lm.config import Config, RunOptions
from lm.errors import ProgramExit, RunError, UserError, error_class
from lm.files import locked
from lm.record import (
    CHECKPOINTS_DIR,
    LOCK_FILE,
    RUN_FILE,
    RunRecord,
    enclosing_run,
    first_difference,
    has_checkpoints,
    load_record,
    may_differ,
    settings_that_follow_validation,
)
from lm.system import at_stop

_LOCK_SECONDS = 5


class RunDir(NamedTuple):
    """The directory of a run, which only this process may write to."""

    path: str
    checkpoint: Checkpoint | None  # the checkpoint to resume from; None starts a new run


def open_run_dir(
    options: RunOptions, record: RunRecord, config_class: type[Config], stack: contextlib.ExitStack
) -> RunDir:
    """Create and lock the directory of a run; if the run is resumed, find its newest checkpoint.

    Closing `stack` releases the directory. A resumed run must have the same record. `config_class`
    has the defaults of fields that the class has gained since the run started.
    """
    output_dir, resume = options.output_dir, options.resume
    path = _make_and_lock(output_dir, record.config["name"], stack)
    is_run = store.list_checkpoints(path) or os.path.exists(os.path.join(path, RUN_FILE))
    inner = next(pathlib.Path(path).glob(f"*/{RUN_FILE}"), None)
    if inner and not is_run:  # In a report, the new run would hide the other runs.
        raise UserError(
            f"output_dir {path} contains the run {inner.parent.name}: choose a new directory, or"
            f" continue this run with --resume --output_dir {inner.parent}"
        )
    if not resume:
        if is_run:
            raise UserError(
                f"output_dir {path} already contains a run: add --resume, or choose a"
                " different directory"
            )
        return RunDir(path, None)
    store.remove_temporary(path)
    checkpoint = store.find_newest(path)
    if checkpoint:
        _check_resumable(checkpoint, options, record, config_class)
    elif has_checkpoints(path):  # for example, their disk is not mounted
        raise RunError(
            f"the checkpoints of {path} are missing: restore them, or remove {RUN_FILE} from"
            " this directory to start again"
        )
    else:
        before = load_record(path)
        if before and before.init_from and not options.init_from:
            raise UserError(
                f"{path} has no checkpoint yet: add --init_from {before.init_from.path} to start it"
                " again with the same weights"
            )
        logger.warning("no checkpoint in %s: starting a new run", path)
    return RunDir(path, checkpoint)


def _make_and_lock(output_dir: str | None, name: str, stack: contextlib.ExitStack) -> str:
    """Return the directory. Closing `stack` removes it if it is new and unused."""
    deadline = time.monotonic() + _LOCK_SECONDS
    path = output_dir
    try:
        while True:
            path, is_new = _make(output_dir, name)
            with contextlib.suppress(FileNotFoundError):  # The previous job removed it.
                with contextlib.suppress(BlockingIOError):
                    stack.enter_context(locked(os.path.join(path, LOCK_FILE)))
                    break
            # Wait a moment: a job that was killed may still be ending.
            if time.monotonic() > deadline:
                # This is not a UserError, because a later attempt may succeed.
                raise RunError(
                    f"another job is using output_dir {path}{_last_start(path)}. If its host has"
                    " died, an NFS server may keep its lock: remove"
                    f" {os.path.join(path, LOCK_FILE)}"
                )
            time.sleep(0.1)
        if is_new:
            stack.callback(_remove_if_unused, path)
            stack.enter_context(at_stop(functools.partial(_remove_if_unused, path)))
        for place in filter(os.path.exists, (path, os.path.join(path, CHECKPOINTS_DIR))):
            tempfile.TemporaryFile(dir=place).close()  # fail now, not after the first epoch
    except OSError as error:
        raise error_class(error)(f"cannot write to output_dir {path}: {error.strerror}") from error
    return path


def _last_start(path: str) -> str:
    """Return the time and the host of the last start of a run, or "" if run.json lacks them."""
    # run.json may be missing, corrupt, or from a different version.
    with contextlib.suppress(ProgramExit, AttributeError, LookupError, TypeError, ValueError):
        provenance = load_record(path).provenance
        host, *_ = provenance["ranks_by_host"]  # rank 0 has the lock
        return f" (last started {provenance['date']} on {host})"
    return ""


def _make(output_dir: str | None, name: str) -> tuple[str, bool]:
    """Return the directory, and whether it is new. A default name is the next free name."""
    base = output_dir or os.path.join("runs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    base = os.path.abspath(base)  # The run scripts work in a different directory than the user.
    _check_place(base)
    for number in itertools.count(1):
        path = base if number == 1 else f"{base}-{number}"
        try:
            os.makedirs(path)
            return path, True
        except FileExistsError:  # Another run started in the same second.
            if output_dir:
                os.makedirs(path, exist_ok=True)  # fails if it is not a directory
                return path, False


def _check_place(path: str) -> None:
    """Reject a broken link, and a directory inside the checkpoints of a run."""
    for place in (os.path.join(path, CHECKPOINTS_DIR), path, *pathlib.Path(path).parents):
        if os.path.islink(place) and not os.path.exists(place):
            raise RunError(f"{place} is a broken symlink; mount its target or remove it")
    if run := enclosing_run(path):
        raise UserError(f"output_dir {path} is inside the run {run}: choose another directory")


def _remove_if_unused(path: str) -> None:
    """Remove the directory of a run that could not start. The caller must hold its lock."""
    with contextlib.suppress(OSError):
        if os.listdir(path) == [LOCK_FILE]:
            os.remove(os.path.join(path, LOCK_FILE))
            os.rmdir(path)


def _check_resumable(
    checkpoint: Checkpoint, options: RunOptions, record: RunRecord, config_class: type[Config]
) -> None:
    before = checkpoint.manifest.record.upgraded(config_class)
    follows = bool(settings_that_follow_validation(record.config, options))
    ignored = may_differ("resume", Config, config=record.config, follows_validation=follows)
    ignored |= config_class(**record.config).unused.keys()  # Older versions accepted any values.
    difference = first_difference(before, record, ignored, options.allow_changed_config_file)
    if difference:
        raise _rejection(difference, before, record)
    for name in sorted(ignored):
        if record.config[name] != before.config[name]:
            logger.warning(f"{name} was {before.config[name]!r} and is {record.config[name]!r} now")


def _rejection(name: str, earlier: RunRecord, record: RunRecord) -> UserError:
    if name in record.files:
        reason = f"{name} has changed"
        fix = "if the network is still the same, add --allow_changed_config_file"
    elif name in ("corpus", "vocabulary"):
        reason, fix = f"the {name} has changed", "check --data_path"
        if name == "vocabulary":  # A resumed run reads it from these files.
            fix = f"restore vocabulary.txt or tokenizer/ in the run's directory, or {fix}"
    else:
        before, now = earlier.config.get(name), record.config.get(name)
        reason = f"{name} was {before!r} in this run and is {now!r} now"
        fix = f"leave out --{name} and --config"
        if record.config_file:  # which needs --config
            fix = f"leave out --{name}" if before is None else f"use --{name}={before}"
        fix += ", or start a new run with --init_from"
    return UserError(f"cannot resume: {reason}; {fix}")
