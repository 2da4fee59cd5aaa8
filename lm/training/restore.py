"""The initial values of a run: from a checkpoint to resume, from other weights, or neither."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm import logger
from lm.checkpoint import store
from lm.checkpoint.run_dir import RunDir
from lm.checkpoint.variables import check_fits, load_variables, saved_shapes, weight_names
from lm.config import RunOptions
from lm.data.vocabulary import Vocabulary
from lm.errors import UserError
from lm.record import from_json
from lm.training.progress import TrainProgress

# Weights of an adaptive softmax or input that belong to words.
_OF_WORDS = re.compile(r"(.+/)?embedding/band_\d+|softmax/(weights|bias|cluster_\d+/words)")


class BroadcastHook(tf.train.SessionRunHook):
    """Loads the checkpoint of rank 0, and gives its variables to all ranks before the first step.

    Without arrays, the variables keep their initial values.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray] | None, broadcast: Any):
        self._arrays, self._broadcast = arrays, broadcast

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Set the variables; called when the session exists."""
        if self._arrays is not None:
            load_variables(session, self._arrays)
        self._arrays = None  # frees the memory
        session.run(self._broadcast)


def initial_progress(run_dir: RunDir | None) -> TrainProgress:
    """Return the progress to resume from. Ranks without the run directory start at step 0."""
    if run_dir is None or run_dir.checkpoint is None:
        return TrainProgress()
    source = os.path.join(run_dir.checkpoint, store.MANIFEST)
    return from_json(TrainProgress, store.read_manifest(run_dir.checkpoint).progress, source)


def initial_arrays(
    run_dir: RunDir,
    options: RunOptions,
    vocabulary: Vocabulary,
    state_shapes: Mapping[str, Sequence[int]],
) -> dict[str, np.ndarray] | None:
    """Read the initial values of the current graph from a checkpoint, or return None."""
    graph = tf.get_default_graph()
    shapes, weights = saved_shapes(graph, state_shapes), weight_names(graph)
    if run_dir.checkpoint:
        unused = set(store.read_manifest(run_dir.checkpoint).weights).difference(weights)
        if unused:  # possible with --allow_changed_config_file
            raise UserError(
                f"cannot resume: this network does not use {min(unused)} of the checkpoint. Start a"
                " new run with --init_from and --init_partly"
            )
        arrays = store.load_arrays(run_dir.checkpoint)
        check_fits(arrays, shapes)
        return arrays
    if options.init_from:
        return _weights_of(options, vocabulary, {name: shapes[name] for name in weights})
    return None


def _weights_of(
    options: RunOptions, vocabulary: Vocabulary, shapes: Mapping[str, list]
) -> dict[str, np.ndarray]:
    """Read the weights of --init_from."""
    path = options.init_from
    same_words = store.verify(path).record.vocabulary == vocabulary.sha256
    arrays, source = store.load_weights(path), f"--init_from {path}"
    if options.init_partly:
        return _fitting_weights(arrays, source, shapes, same_words, len(vocabulary))
    if not same_words:
        raise UserError(
            f"{source} has a different vocabulary, so its token IDs differ;"
            " --init_partly loads only the layers"
        )
    unused = sorted(arrays.keys() - shapes.keys())
    if unused:
        raise UserError(
            f"{source} has {unused[0]}, which this model does not use; --init_partly omits such"
            " weights"
        )
    check_fits(arrays, shapes)
    return arrays


def _fitting_weights(
    arrays: Mapping[str, np.ndarray],
    source: str,
    shapes: Mapping[str, list],
    same_words: bool,
    vocab_size: int,
) -> dict[str, np.ndarray]:
    """Return the arrays whose names and shapes this model has."""
    loaded = {
        name: array
        for name, array in arrays.items()
        if list(array.shape) == shapes.get(name)
        # An array with a row or column per word is useful only if the words are the same.
        and (same_words or not (vocab_size in array.shape or _OF_WORDS.fullmatch(name)))
    }
    if not loaded:
        raise UserError(f"{source}: the checkpoint has no weights that fit this model")
    rest = ", ".join(name for name in shapes if name not in loaded) or "none"
    logger.info("--init_from: loaded %s; initialized %s", ", ".join(loaded), rest)
    return loaded
