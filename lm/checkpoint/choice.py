"""Which checkpoint of a run: the last, the best, the one that was named, those to keep."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
from collections.abc import Iterable
from typing import Optional

from lm.checkpoint import manifest as manifests
from lm.checkpoint.format import list_checkpoints, remove
from lm.checkpoint.manifest import Manifest
from lm.checkpoint.verification import State, examine, state_of, verify
from lm.errors import RunError, UserError, error_class

logger = logging.getLogger("lm")


def find(run_dir: str, which: str = "last") -> str:
    """Choose a checkpoint of a run, skipping damaged ones with a warning.

    Args:
      run_dir: The run's output_dir.
      which: "last"; "best", by validation perplexity; or the path of a checkpoint directory.

    Returns:
      The directory of a checkpoint that has been verified.

    Raises:
      UserError: There is none, or none that can be used, or one that only a newer version of
        this program can read: an older one must not silently take its place.
      RunError: One cannot be read, at least now.
    """
    if which not in ("last", "best"):
        return checked(which)
    found = newest(run_dir) if which == "last" else _best(run_dir)
    if found is None:
        kind = "checkpoint" if which == "last" else "checkpoint with a validation perplexity"
        raise UserError(f"{run_dir} has no {kind}")
    return found


def checked(checkpoint_dir: str) -> str:
    """Verify a checkpoint that somebody has named, and return it.

    Raises:
      UserError: It cannot be used.
      RunError: It cannot be read, at least now.
    """
    try:
        verify(checkpoint_dir)
    except RunError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and error_class(cause) is RunError:
            raise
        raise UserError(f"{checkpoint_dir} is not a usable checkpoint: {error}") from error
    return checkpoint_dir


def newest(run_dir: str) -> Optional[str]:
    """Return the newest checkpoint that verifies, or None where a run has no checkpoint.

    To start afresh, or from an older one than a newer version of this program has written, would
    silently throw away what may be days of training.

    Raises:
      UserError: There are checkpoints, but all are corrupt, or a newer version has written one.
      RunError: None can be read, at least now.
    """
    states = []
    for checkpoint_dir in reversed(list_checkpoints(run_dir)):
        states.append(examine(checkpoint_dir))
        if states[-1] is State.WHOLE:
            return checkpoint_dir
    if State.UNREADABLE in states:  # not a UserError: a job that is started again may find it
        raise RunError(f"no checkpoint in {run_dir} can be read: see the warnings")
    if states:
        raise UserError(f"all {len(states)} checkpoints in {run_dir} are corrupt")
    return None


def set_aside_unread(run_dir: str, taken: str) -> None:
    """Rename the checkpoints that `newest` could not read and passed over.

    They may be whole. The next start would go on from one of them, without the events of the steps
    before it, which this one removes.

    Args:
      run_dir: The run's output_dir.
      taken: The checkpoint that the run goes on from.

    Raises:
      RunError: One cannot be renamed.
    """
    found = list_checkpoints(run_dir)
    for checkpoint_dir in found[found.index(taken) + 1 :]:
        if state_of(checkpoint_dir) is State.DAMAGED:
            continue  # the save of its step replaces it
        parent, name = os.path.split(checkpoint_dir)
        stem = os.path.join(parent, f"unread-{name}")
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        kept = next(name for name in names if not os.path.lexists(name))
        try:
            os.rename(checkpoint_dir, kept)
        except OSError as error:
            raise RunError(
                f"{checkpoint_dir} cannot be read, nor renamed ({error.strerror}): move it away to"
                f" go on from {taken}"
            ) from error
        logger.warning("%s is kept as %s; the run goes on from %s", checkpoint_dir, kept, taken)


def _best(run_dir: str) -> Optional[str]:
    known = []
    for checkpoint_dir in list_checkpoints(run_dir):
        try:
            known.append((manifests.read(checkpoint_dir), checkpoint_dir))
        except RunError as error:
            logger.warning("skipping a checkpoint: %s", error)
    by_perplexity = _by_perplexity(known)
    found = next((found for found in by_perplexity if examine(found) is State.WHOLE), None)
    if found:
        _warn_if_not_best(manifests.read(found), known[-1][0])
    return found


def _warn_if_not_best(found: Manifest, last: Manifest) -> None:
    # Its save may have failed, on a full disk, or it cannot be read any more.
    best = min(filter(math.isfinite, last.position.get("valid_perplexities", ())), default=math.inf)
    if best < found.valid_perplexity:
        logger.warning(
            "the epoch with the best validation perplexity, %.2f, has no checkpoint that can be"
            " used: taken is that of step %d, with %.2f",
            best,
            found.step,
            found.valid_perplexity,
        )


def _by_perplexity(checkpoints: Iterable[tuple[Manifest, str]]) -> list[str]:
    """Return those whose validation perplexity is known, the best first."""
    known = []
    for manifest, checkpoint_dir in checkpoints:
        perplexity = manifest.valid_perplexity
        if perplexity is not None and math.isfinite(perplexity):
            known.append((perplexity, checkpoint_dir))
    return [checkpoint_dir for _, checkpoint_dir in sorted(known)]


def prune(run_dir: str, keep: int) -> None:
    """Remove old checkpoints: all but the last `keep` and the best by validation perplexity.

    Only whole ones count as kept or as best, and none is removed that is not older than `keep`
    whole ones. So damaged ones never push out the good; they go when they are as old. Those that
    were saved after the ranks had parted, which one may have to do without, push out only each
    other. What cannot be read stays.
    """
    try:
        states = {found: state_of(found) for found in list_checkpoints(run_dir)}
        whole = []
        for checkpoint_dir, state in states.items():
            if state is State.WHOLE:
                try:
                    whole.append((manifests.read(checkpoint_dir), checkpoint_dir))
                except RunError as error:  # it was whole a moment ago
                    logger.warning("%s is kept: %s", checkpoint_dir, error)
                    states[checkpoint_dir] = State.UNREADABLE
    except UserError as error:  # what a newer version wrote may be the best: not ours to judge
        logger.warning("no checkpoint is removed: %s", error)
        return
    in_sync = [found for manifest, found in whole if manifest.in_sync]
    parted = [found for manifest, found in whole if not manifest.in_sync]
    old = parted[:-keep]
    if len(in_sync) >= keep:
        old += itertools.takewhile(lambda found: found != in_sync[-keep], states)
    spared = _by_perplexity(whole)[:1]
    spared += [found for found, state in states.items() if state is State.UNREADABLE]
    for checkpoint_dir in set(old) - set(spared):
        with contextlib.suppress(OSError):
            remove(checkpoint_dir)
