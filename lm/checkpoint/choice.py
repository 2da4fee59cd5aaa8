"""Which checkpoint of a run: the last, the best, the one that was named, those to keep."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Optional

from lm.checkpoint import manifest as manifests
from lm.checkpoint.format import list_checkpoints, remove
from lm.checkpoint.verification import is_whole, verifies, verify
from lm.errors import RunError, UserError

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
    """
    try:
        verify(checkpoint_dir)
    except RunError as error:
        raise UserError(f"{checkpoint_dir} is not a usable checkpoint: {error}") from error
    return checkpoint_dir


def newest(run_dir: str) -> Optional[str]:
    """Return the newest checkpoint that verifies, or None where a run has no checkpoint.

    Raises:
      UserError: There are checkpoints, but all are damaged, or a newer version of this program
        has written the newest: to start afresh, or from an older one, would silently throw away
        what may be days of training.
    """
    every = list_checkpoints(run_dir)
    for checkpoint_dir in reversed(every):
        if verifies(checkpoint_dir):
            return checkpoint_dir
    if every:
        raise UserError(f"all {len(every)} checkpoints in {run_dir} are damaged")
    return None


def _best(run_dir: str) -> Optional[str]:
    for checkpoint_dir in _by_perplexity(run_dir):
        if verifies(checkpoint_dir):
            return checkpoint_dir
    return None


def _by_perplexity(run_dir: str) -> list[str]:
    """Return the checkpoints whose validation perplexity is known, the best first.

    Raises:
      UserError: A newer version of this program has written one, which may be the best.
    """
    known = []
    for checkpoint_dir in list_checkpoints(run_dir):
        with contextlib.suppress(RunError):
            perplexity = manifests.read(checkpoint_dir).valid_perplexity
            if perplexity is not None and math.isfinite(perplexity):
                known.append((perplexity, checkpoint_dir))
    return [checkpoint_dir for _, checkpoint_dir in sorted(known)]


def prune(run_dir: str, keep: int) -> None:
    """Remove old checkpoints: all but the last `keep` and the best by validation perplexity.

    Only whole ones count as kept or as best, and none is removed that is not older than `keep`
    whole ones. So damaged ones never push out the good; they go when they are as old.
    """
    try:
        best = next(filter(is_whole, _by_perplexity(run_dir)), None)
        whole = 0
        for checkpoint_dir in reversed(list_checkpoints(run_dir)):
            if whole < keep:
                whole += is_whole(checkpoint_dir)
            elif checkpoint_dir != best:
                with contextlib.suppress(OSError):
                    remove(checkpoint_dir)
    except UserError as error:  # what a newer version wrote may be the best: not ours to judge
        logger.warning("no checkpoint is removed: %s", error)
