"""What a run starts with: a checkpoint to resume, weights to begin with, or neither."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint import choice, manifest
from lm.checkpoint import format as checkpoint
from lm.checkpoint.run_dir import RunDir
from lm.checkpoint.variables import check_fits, load_variables, saved_shapes, weight_names
from lm.config import RunOptions
from lm.data.vocabulary import Vocabulary
from lm.errors import UserError
from lm.record import from_json
from lm.training.position import Position

logger = logging.getLogger("lm")


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
        self._arrays = None  # to the end of the run there is a better use of the memory


def starting_position(run_dir: Optional[RunDir]) -> Position:
    """Return where a run goes on.

    Args:
      run_dir: Of rank 0; None on the others, which start from the beginning until they are told.

    Raises:
      UserError, RunError: The checkpoint's manifest has no position that this version knows.
    """
    if run_dir is None or run_dir.checkpoint_dir is None:
        return Position()
    position = manifest.read(run_dir.checkpoint_dir).position
    source = os.path.join(run_dir.checkpoint_dir, manifest.NAME)
    return from_json(Position, position, source)


def starting_arrays(
    run_dir: RunDir, options: RunOptions, vocabulary: Vocabulary
) -> Optional[dict[str, np.ndarray]]:
    """Read what a run starts with, for the variables of the current graph.

    Args:
      run_dir: With the checkpoint to resume from.
      options: For `init_from`, the checkpoint whose weights, and nothing else, to start with, and
        `init_partly`, whether those that do not fit are left out.
      vocabulary: Of the run.

    Returns:
      Arrays by variable name; None where the run starts afresh.

    Raises:
      UserError: The checkpoint does not fit the model.
      RunError: It cannot be read.
    """
    if run_dir.checkpoint_dir:
        arrays = checkpoint.load_arrays(run_dir.checkpoint_dir)
        needed = saved_shapes()
        gone = set(manifest.read(run_dir.checkpoint_dir).weights).difference(weight_names())
        if gone:  # with --allow_changed_config_file
            raise UserError(
                f"cannot resume: the checkpoint has {min(gone)}, which this network does not use:"
                " that is another one; start a new run with --init_from and --init_partly"
            )
    elif options.init_from and options.init_partly:
        return _fitting_weights(options.init_from, vocabulary)
    elif options.init_from:
        needed = _weight_shapes()
        arrays = _foreign_weights(options.init_from, vocabulary, needed)
    else:
        return None
    check_fits(arrays, needed)
    return arrays


def _foreign_weights(
    path: str, vocabulary: Vocabulary, needed: Mapping[str, Sequence]
) -> dict[str, np.ndarray]:
    checkpoint_dir = choice.checked(path)
    if manifest.read(checkpoint_dir).record.vocabulary != vocabulary.checksum:
        raise UserError(
            f"--init_from {path}: it was trained with another vocabulary, so its words have"
            " other ids; --init_partly takes the layers alone"
        )
    arrays = checkpoint.load_weights(checkpoint_dir)
    unused = sorted(arrays.keys() - needed.keys())
    if unused:
        raise UserError(
            f"--init_from {path}: it has {unused[0]}, which this model does not use; --init_partly"
            " leaves out what does not fit"
        )
    return arrays


def _fitting_weights(path: str, vocabulary: Vocabulary) -> dict[str, np.ndarray]:
    """Read the weights of this model that another one has too, in the same shape."""
    checkpoint_dir = choice.checked(path)
    arrays = checkpoint.load_weights(checkpoint_dir)
    same_words = manifest.read(checkpoint_dir).record.vocabulary == vocabulary.checksum
    shapes = _weight_shapes()
    taken = [
        name
        for name, shape in shapes.items()
        # What has a row or a column for each word is of use only where they are the same words.
        if name in arrays
        and list(arrays[name].shape) == shape
        and (same_words or len(vocabulary) not in shape)
    ]
    if not taken:
        raise UserError(f"--init_from {path}: no weight of it fits this model")
    afresh = [name for name in shapes if name not in taken]
    logger.info(
        "--init_from: taken: %s; started afresh: %s", ", ".join(taken), ", ".join(afresh) or "none"
    )
    return {name: arrays[name] for name in taken}


def _weight_shapes() -> dict[str, list[int]]:
    shapes = saved_shapes()
    return {name: shapes[name] for name in weight_names()}
