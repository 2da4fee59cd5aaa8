"""What a run starts with: a checkpoint to resume, weights to begin with, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint import format as checkpoint
from lm.checkpoint.variables import load_variables, weight_names
from lm.errors import UserError
from lm.training.job import Job


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


def starting_arrays(job: Job) -> Optional[dict[str, np.ndarray]]:
    """Read what the run starts with, on rank 0; None on the others, or where it starts afresh.

    Call it in the training graph.

    Raises:
      UserError: The checkpoint does not fit the model.
      RunError: It cannot be read.
    """
    if job.run_dir is None:
        return None
    if job.run_dir.checkpoint_dir:
        arrays = checkpoint.load_arrays(job.run_dir.checkpoint_dir)
        needed = [variable.op.name for variable in tf.global_variables()]
    elif job.options.init_from:
        arrays = _foreign_weights(job.options.init_from, job.corpus.vocabulary.checksum)
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
