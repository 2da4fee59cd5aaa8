"""Weights and recurrent state: out of a session into arrays, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from lm.errors import UserError

Concat = Callable[[np.ndarray], np.ndarray]


def weight_names() -> tuple[str, ...]:
    """Return the names of the current graph's weights: all variables of its network, also those
    that are not trained."""
    return tuple(variable.op.name for variable in _weights())


def saved_shapes() -> dict[str, list[int]]:
    """Return the shapes of what a checkpoint of the current graph holds, by name: variables, and
    the recurrent state with None for its rows."""
    shapes = {v.op.name: v.shape.as_list() for v in [*_weights(), *tf.global_variables()]}
    state = _state_variables(tf.get_default_graph())
    return {**shapes, **{name: [None, *v.shape.as_list()[1:]] for name, v in state.items()}}


def check_fits(arrays: Mapping[str, np.ndarray], shapes: Mapping[str, Sequence]) -> None:
    """Check that a checkpoint has what a model needs.

    Args:
      arrays: What the checkpoint holds, by name.
      shapes: What is needed, by name, with None for a first axis of any length.

    Raises:
      UserError: An array is missing, or has another shape; the message names it.
    """
    for name, shape in shapes.items():
        if name not in arrays:
            raise UserError(f"the checkpoint has no {name}, which this model needs")
        found = list(arrays[name].shape)
        expected = [found[0], *shape[1:]] if shape[:1] == [None] else shape
        if found != expected:
            raise UserError(
                f"{name} has the shape {found} in the checkpoint, but {expected} in this model"
            )


def read_variables(session: tf.Session) -> dict[str, np.ndarray]:
    """Copy all variables that the ranks have in common: weights, optimizer state, global step."""
    variables = _global_variables(session)
    # A real copy: a fetched array may share its memory with the variable, which the next update
    # changes in place while the copy is being written to the disk.
    values = session.run(variables)
    return {name: np.array(value) for name, value in values.items()}


def first_not_finite(session: tf.Session, arrays: Mapping[str, np.ndarray]) -> Optional[str]:
    """Return the name of the first array that training has made NaN or infinite, or None.

    Args:
      session: The training session.
      arrays: From `read_variables` and `read_state`.
    """
    with session.graph.as_default():
        # An untrained one, such as a mask of -inf, is as its author made it.
        trained = {v.op.name for v in tf.trainable_variables()}
        untrained = set(weight_names()) - trained
    for name, array in arrays.items():
        if name in untrained:
            continue
        # The extremes, which a NaN anywhere makes NaN: no array of as many flags is needed. A state
        # may be of log-probabilities, and -inf.
        if not (array.max() < np.inf and (array.min() > -np.inf or name.startswith("state/"))):
            return name
    return None


def load_variables(session: tf.Session, arrays: Mapping[str, np.ndarray]) -> None:
    """Set variables that the ranks have in common.

    Args:
      session: Session whose variables are initialized.
      arrays: By name; other names than variables' are left alone.

    Raises:
      UserError: A shape does not fit; the message names the variable.
    """
    _assign(session, {n: v for n, v in _global_variables(session).items() if n in arrays}, arrays)


def read_state(session: tf.Session, concat: Concat) -> dict[str, np.ndarray]:
    """Gather the recurrent state of training, so that any number of ranks can resume with it.

    Args:
      session: The training session.
      concat: Joins the arrays of all ranks, in the order of the ranks, along axis 0.

    Returns:
      By name ("state/0/h"), [batch_size, ...]: a row for each row of the global batch.
    """
    values = session.run(_state_variables(session.graph))
    return {name: concat(value) for name, value in values.items()}


def load_state(
    session: tf.Session, arrays: Optional[Mapping[str, np.ndarray]], rows: slice, concat: Concat
) -> None:
    """Give each rank its rows of the recurrent state.

    Args:
      session: The training session.
      arrays: What `read_state` returned, on one rank; None on the others, which need not see
        the file that it came from.
      rows: Those of the global batch that are this rank's.
      concat: See `read_state`.
    """
    variables = _state_variables(session.graph)
    every_row = _share(variables, arrays, concat)
    own = {name: value[rows] for name, value in every_row.items()}
    _assign(session, variables, own)


def set_shared_weights(
    session: tf.Session, arrays: Optional[Mapping[str, np.ndarray]], concat: Concat
) -> None:
    """Set the weights of all ranks.

    Args:
      session: The training session.
      arrays: By name, on one rank; None on the others.
      concat: See `read_state`.
    """
    with session.graph.as_default():
        variables = {variable.op.name: variable for variable in _weights()}
    shared = _share(variables, arrays, concat)
    # Of a number without axes, `concat` makes a list of one.
    own = {name: value.reshape(variables[name].shape) for name, value in shared.items()}
    _assign(session, variables, own)


def _share(
    variables: Mapping, arrays: Optional[Mapping[str, np.ndarray]], concat: Concat
) -> dict[str, np.ndarray]:
    """Give the arrays of the one rank that has them to all."""
    shared = {}
    for name, variable in variables.items():
        nothing = np.zeros([0, *variable.shape[1:]], variable.dtype.as_numpy_dtype)
        shared[name] = concat(nothing if arrays is None else arrays[name])
    return shared


def _global_variables(session: tf.Session) -> dict[str, tf.Variable]:
    # The weights first, whatever was made first: the files of equal checkpoints are equal.
    with session.graph.as_default():
        variables = [*_weights(), *tf.global_variables()]
    return {variable.op.name: variable for variable in variables}


def _weights() -> list[tf.Variable]:
    return tf.get_collection(tf.GraphKeys.MODEL_VARIABLES)


def _state_variables(graph: tf.Graph) -> dict[str, tf.Variable]:
    """Variables train/state_<name> of lm/model/windows.py, as state/<name>."""
    with graph.as_default():
        found = tf.local_variables(scope="train/state_")
    return {v.op.name.replace("train/state_", "state/", 1): v for v in found}


def _assign(session: tf.Session, variables: Mapping, arrays: Mapping[str, np.ndarray]) -> None:
    check_fits(arrays, {name: v.shape.as_list() for name, v in variables.items()})
    # By way of the initializers: a finalized graph cannot be given new assign operations. Of those
    # that start from the same tensor, one at a time.
    rest = dict(variables)
    while rest:
        fed = {variable.initializer.inputs[1]: name for name, variable in rest.items()}
        initializers = [rest.pop(name).initializer for name in fed.values()]
        session.run(initializers, {tensor: arrays[name] for tensor, name in fed.items()})


def set_weights(session: tf.Session, weights: Mapping[str, np.ndarray]) -> None:
    """Give the graph's weights the values of a checkpoint.

    Args:
      session: Session of the graph.
      weights: Variable name -> value.

    Raises:
      UserError: One is missing or has another shape, or the graph has no use for one.
    """
    variables = {variable.op.name: variable for variable in _weights()}
    unused = sorted(weights.keys() - variables.keys())
    if unused:
        raise UserError(f"the checkpoint has the weight {unused[0]}, which this model does not use")
    _assign(session, variables, weights)
