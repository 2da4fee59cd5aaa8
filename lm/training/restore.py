"""The initial values of a run: from a checkpoint to resume, from other weights, or neither."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm import logger
from lm.checkpoint import store
from lm.checkpoint.run_dir import RunDir
from lm.checkpoint.tensors import load_arrays, tensor_shapes
from lm.checkpoint.variables import (
    VariableLoader,
    check_fits,
    fitting_tensors,
    saved_state_shapes,
    variable_shapes,
    weight_names,
)
from lm.config import RunOptions
from lm.data.tokenizer import Tokenizer
from lm.distributed.agreement import on_all_ranks
from lm.distributed.communicator import Communicator
from lm.errors import UserError

# Weights of an adaptive softmax or input that belong to words.
_OF_WORDS = re.compile(r"(.+/)?embedding/band_\d+|softmax/(weights|bias|cluster_\d+/words)")


class InitialValues(NamedTuple):
    """The contents of a checkpoint that initialize a run."""

    checkpoint: str  # directory
    tensors: Mapping[str, str]  # the name of the tensor of each variable
    state: Mapping[str, np.ndarray]  # the recurrent state of all rows; empty for a new run


class BroadcastHook(tf.train.SessionRunHook):
    """Loads the checkpoint of rank 0, and gives its variables to all ranks before the first step.

    Without values, the variables keep their initial values. Only rank 0 has values.
    """

    def __init__(self, comm: Communicator, values: InitialValues | None, broadcast: Any):
        self._comm, self._values, self._broadcast = comm, values, broadcast
        self._loader = values and VariableLoader(values.tensors)

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Set the variables; called when the session exists."""
        values = self._values
        with on_all_ranks(self._comm):
            if values:
                self._loader.load(session, values.checkpoint, values.tensors)
        session.run(self._broadcast)


def initial_values(
    run_dir: RunDir,
    options: RunOptions,
    tokenizer: Tokenizer,
    state_shapes: Mapping[str, Sequence[int]],
) -> InitialValues | None:
    """Return the initial values of the current graph in a checkpoint, or None."""
    graph, checkpoint = tf.get_default_graph(), run_dir.checkpoint
    variables, state = variable_shapes(graph), saved_state_shapes(state_shapes)
    weights = weight_names(graph)
    if checkpoint:
        unused = set(checkpoint.manifest.weights).difference(weights)
        if unused:  # possible with --allow_changed_config_file
            raise UserError(
                f"cannot resume: this network does not use {min(unused)} of the checkpoint. Start a"
                " new run with --init_from and --init_partly"
            )
        check_fits(tensor_shapes(checkpoint.path), {**variables, **state})
        names = {name: name for name in variables}
        return InitialValues(checkpoint.path, names, load_arrays(checkpoint.path, state))
    if options.init_from:
        shapes = {name: variables[name] for name in weights}
        return InitialValues(options.init_from, _weights_of(options, tokenizer, shapes), {})
    return None


def _weights_of(
    options: RunOptions, tokenizer: Tokenizer, shapes: Mapping[str, list]
) -> dict[str, str]:
    """Return the name of the tensor in --init_from for each weight."""
    path, checkpoint = options.init_from, store.verify(options.init_from)
    same_words = checkpoint.manifest.record.vocabulary == tokenizer.sha256
    if not options.init_partly:
        if not same_words:
            raise UserError(
                f"--init_from {path} has a different vocabulary, so its token IDs differ;"
                " --init_partly loads only the layers"
            )
        return fitting_tensors(checkpoint, shapes, fix="; --init_partly omits such weights")
    tensors, found = store.weight_tensors(checkpoint), tensor_shapes(path)
    fitting = [
        name
        for name in tensors
        if found[name] == shapes.get(name)
        # A weight with a row or column per word is useful only if the words are the same.
        and (same_words or not (len(tokenizer) in found[name] or _OF_WORDS.fullmatch(name)))
    ]
    if not fitting:
        raise UserError(f"--init_from {path}: the checkpoint has no weights that fit this model")
    rest = ", ".join(name for name in shapes if name not in fitting) or "none"
    logger.info("--init_from: loaded %s; initialized %s", ", ".join(fitting), rest)
    return {name: tensors[name] for name in fitting}
