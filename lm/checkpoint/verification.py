"""Which checkpoints are whole: found by hashing them, and remembered.

Old checkpoints are removed after every save, and only verified ones count then. A hash takes
seconds per GB, so what this process has hashed or written itself is not hashed again for that, as
long as its files keep their sizes and times.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os

from lm.checkpoint import manifest as manifests
from lm.checkpoint.manifest import Manifest
from lm.errors import RunError

logger = logging.getLogger("lm")


class State(enum.Enum):
    """What an attempt to verify a checkpoint has found."""

    WHOLE = enum.auto()
    DAMAGED = enum.auto()
    UNREADABLE = enum.auto()  # it may be whole


_found: dict[str, tuple[list, State]] = {}  # by directory: its files then, what they were


def verify(checkpoint_dir: str) -> Manifest:
    """Check every file of a checkpoint against its manifest.

    Args:
      checkpoint_dir: A directory `step-NNNNNNNN`.

    Returns:
      Its manifest.

    Raises:
      RunError: A file is missing, damaged or unreadable; the message names it and says how.
      UserError: A newer version of this program has written it.
    """
    files = _list_files(checkpoint_dir)  # before they are read: a later change must show
    manifest = manifests.read(checkpoint_dir)
    manifests.check_files(checkpoint_dir, manifest)
    _found[checkpoint_dir] = (files, State.WHOLE)
    return manifest


def examine(checkpoint_dir: str) -> State:
    """Tell what a checkpoint is; warns of one that is not whole.

    Raises:
      UserError: A newer version of this program has written it.
    """
    files = _list_files(checkpoint_dir)
    try:
        verify(checkpoint_dir)
        return State.WHOLE
    except manifests.Unreadable as error:
        logger.warning("skipping a checkpoint: %s", error)
        state = State.UNREADABLE
    except RunError as error:
        logger.warning("skipping a corrupt checkpoint: %s", error)
        state = State.DAMAGED
    _found[checkpoint_dir] = (files, state)
    return state


def state_of(checkpoint_dir: str) -> State:
    """Tell the same as `examine`, from memory where this process has found it out before.

    Raises:
      UserError: A newer version of this program has written it.
    """
    files, state = _found.get(checkpoint_dir, (None, State.DAMAGED))
    return state if files == _list_files(checkpoint_dir) else examine(checkpoint_dir)


def remember_whole(checkpoint_dir: str) -> None:
    """Take note that this process has just written a checkpoint."""
    _found[checkpoint_dir] = (_list_files(checkpoint_dir), State.WHOLE)


def forget(checkpoint_dir: str) -> None:
    """Take note that a checkpoint is gone."""
    _found.pop(checkpoint_dir, None)


def _list_files(checkpoint_dir: str) -> list[tuple[str, int, int]]:
    """Return name, bytes and time of the last change (ns) of each file."""
    files = []
    with contextlib.suppress(OSError), os.scandir(checkpoint_dir) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            files.append((entry.name, status.st_size, status.st_mtime_ns))
    return sorted(files)
