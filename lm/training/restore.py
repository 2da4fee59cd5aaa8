"""What a run starts with: a checkpoint to resume, weights to begin with, or neither."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint import format as checkpoint
from lm.checkpoint import manifest
from lm.checkpoint.records import load_record
from lm.checkpoint.run_dir import RunDir
from lm.checkpoint.variables import load_variables, weight_names
from lm.errors import UserError
from lm.training.progress import Position


class RestoreHook(tf.train.SessionRunHook):
    """Sets the variables of rank 0 before they are broadcast to the others.

    Args:
      arrays: By variable name; None leaves them as they are initialized.
    """

    def __init__(self, arrays: Optional[Mapping[str, np.ndarray]]):
        self._arrays = arrays

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Set them; called by the session, before later hooks."""
        if self._arrays is not None:
            load_variables(session, self._arrays)


def starting_position(run_dir: Optional[RunDir]) -> Position:
    """Return where a run goes on, and forget its events after that.

    Args:
      run_dir: Of rank 0; None on the others, which start from the beginning until they are told.

    Raises:
      UserError, RunError: The checkpoint's manifest has no position that this version knows.
    """
    if run_dir is None:
        return Position()
    position = Position()
    if run_dir.checkpoint_dir:
        source = os.path.join(run_dir.checkpoint_dir, manifest.NAME)
        position = load_record(Position, run_dir.position, source)
    run_dir.forget_events_after(position.step, position.epochs_done)
    return position


def starting_arrays(
    run_dir: Optional[RunDir], init_from: Optional[str], vocabulary_checksum: str
) -> Optional[dict[str, np.ndarray]]:
    """Read what a run starts with, for the variables of the current graph.

    Args:
      run_dir: Of rank 0, with the checkpoint to resume from; None on the others.
      init_from: The checkpoint whose weights, and nothing else, to start with, or None.
      vocabulary_checksum: Of the run; `init_from` must have the same.

    Returns:
      Arrays by variable name; None where the run starts afresh, and on other ranks than 0.

    Raises:
      UserError: The checkpoint does not fit the model.
      RunError: It cannot be read.
    """
    if run_dir is None:
        return None
    if run_dir.checkpoint_dir:
        arrays = checkpoint.load_arrays(run_dir.checkpoint_dir)
        needed = [variable.op.name for variable in tf.global_variables()]
    elif init_from:
        arrays = _foreign_weights(init_from, vocabulary_checksum)
        needed = weight_names()
    else:
        return None
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise UserError(f"the checkpoint has no {missing[0]}, which this model needs")
    return arrays


def _foreign_weights(path: str, vocabulary_checksum: str) -> dict[str, np.ndarray]:
    checkpoint_dir = checkpoint.find(path, path)
    if checkpoint.verify(checkpoint_dir).vocabulary != vocabulary_checksum:
        raise UserError(
            f"--init_from {path}: it was trained with another vocabulary, so its words have"
            " other ids"
        )
    return checkpoint.load_weights(checkpoint_dir)
