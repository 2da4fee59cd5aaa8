"""Copy weights and recurrent state from a session into arrays, and back."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint import store
from lm.checkpoint.store import Part
from lm.errors import UserError

# Both mappings are indexed by the name of the variable.
Arrays = Mapping[str, np.ndarray]
Variables = Mapping[str, tf.Variable]
Concat = Callable[[np.ndarray], np.ndarray]  # concatenates the arrays of all ranks along axis 0


def weight_names(graph: tf.Graph) -> tuple[str, ...]:
    """Return the names of all variables of the network, trained or not."""
    return tuple(_weights(graph))


def saved_shapes(
    graph: tf.Graph, state_shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[int | None]]:
    """Return the shapes in a checkpoint by name, with None for the rows of the recurrent state."""
    shapes = {name: v.shape.as_list() for name, v in _global_variables(graph).items()}
    rows = {_state_name(name): [None, *shape] for name, shape in state_shapes.items()}
    return {**shapes, **rows}


def check_fits(arrays: Arrays, shapes: Mapping[str, Sequence]) -> None:
    """Check the arrays of a checkpoint against the required shapes; a first axis may be None."""
    for name, shape in shapes.items():
        if name not in arrays:
            raise UserError(f"the checkpoint has no {name}, which this model needs")
        found = list(arrays[name].shape)
        expected = [found[0], *shape[1:]] if shape[:1] == [None] else shape
        if found != expected:
            raise UserError(
                f"{name} has the shape {found} in the checkpoint, but {expected} in this model"
            )


class VariableReader:
    """Copies the variables that all ranks share: weights, optimizer slots, global step.

    A large variable is read in parts, so that a save needs little memory. Create the reader in the
    graph of the variables, before the graph is finalized.
    """

    def __init__(self) -> None:
        self._variables = _global_variables(tf.get_default_graph())
        with tf.name_scope("lm_reader"):
            self._range_ph = tf.placeholder(tf.int32, [2], "range")
            rows = tf.range(self._range_ph[0], self._range_ph[1])
            self._rows = {
                name: variable.sparse_read(rows)
                for name, variable in self._variables.items()
                if variable.shape.rank and _num_bytes(variable) > store.PART_BYTES
            }

    def parts(self, session: tf.Session) -> Iterator[Part]:
        """Yield all variables. No variable may change meanwhile."""
        for name, variable in self._variables.items():
            if name not in self._rows:
                # Make a real copy, because a fetched array may share its memory with the variable,
                # which the next update changes in place while the copy is written to the disk.
                array = np.array(session.run(variable))
                yield Part(name, array, array.shape)
                continue
            shape = variable.shape.as_list()
            size = max(1, shape[0] * store.PART_BYTES // _num_bytes(variable))
            for first in range(0, shape[0], size):
                feed = {self._range_ph: [first, min(first + size, shape[0])]}
                yield Part(name, session.run(self._rows[name], feed), shape, first)


def _num_bytes(variable: tf.Variable) -> int:
    return math.prod(variable.shape.as_list()) * variable.dtype.size


def first_not_finite(graph: tf.Graph, parts: Iterable[Part]) -> str | None:
    """Return the name of the first array that training made NaN or infinite, or None."""
    trained = {v.op.name for v in graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)}
    untrained = _weights(graph).keys() - trained  # for example, a mask may contain -inf
    for name, array, *_ in parts:
        # A NaN anywhere makes both extremes NaN. A recurrent state may hold log-probabilities,
        # which may be -inf.
        lowest_is_finite = array.min() > -np.inf or name.startswith("state/")
        if name not in untrained and not (array.max() < np.inf and lowest_is_finite):
            return name
    return None


def load_variables(session: tf.Session, arrays: Arrays) -> None:
    """Set variables that the ranks share. Arrays with other names are ignored."""
    found = {n: v for n, v in _global_variables(session.graph).items() if n in arrays}
    _assign(session, found, arrays)


def gather_state(state: Arrays, concat: Concat) -> dict[str, np.ndarray]:
    """Gather the recurrent state of all ranks, so that any number of ranks can resume with it.

    Return [batch_size, ...] by name ("state/0/h"), one row for each row of the global batch.
    """
    return {_state_name(name): concat(array) for name, array in state.items()}


def local_state(
    state: Arrays, arrays: Arrays | None, rows: slice, concat: Concat
) -> dict[str, np.ndarray]:
    """Return this rank's rows of the recurrent state in a checkpoint.

    Only rank 0 passes the arrays of the checkpoint, because other ranks may not see its disk. The
    result has the names and the types of `state`.
    """
    own = {}
    for name, array in state.items():
        saved = array[:0] if arrays is None else arrays[_state_name(name)]
        own[name] = concat(saved)[rows]
    return own


def set_weights(session: tf.Session, arrays: Arrays, is_part: bool = False) -> None:
    """Set the weights of the graph to the weights of a checkpoint.

    If `is_part`, the graph may lack weights of the checkpoint.
    """
    weights = _weights(session.graph)
    unused = sorted(arrays.keys() - weights.keys())
    if unused and not is_part:
        raise UserError(f"the checkpoint has the weight {unused[0]}, which this model does not use")
    _assign(session, weights, arrays)


def _state_name(name: str) -> str:
    return f"state/{name}"


def _weights(graph: tf.Graph) -> dict[str, tf.Variable]:
    return {v.op.name: v for v in graph.get_collection(tf.GraphKeys.MODEL_VARIABLES)}


def _global_variables(graph: tf.Graph) -> dict[str, tf.Variable]:
    # Put the weights first, in the order of their creation, so that equal checkpoints have equal
    # files.
    rest = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    return {**_weights(graph), **{v.op.name: v for v in rest}}


def _assign(session: tf.Session, variables: Variables, arrays: Arrays) -> None:
    check_fits(arrays, {name: v.shape.as_list() for name, v in variables.items()})
    # Feed the initializers: a finalized graph cannot get new assign operations. Variables that
    # share an initial value are assigned one at a time.
    rest = dict(variables)
    while rest:
        fed = {variable.initializer.inputs[1]: name for name, variable in rest.items()}
        initializers = [rest.pop(name).initializer for name in fed.values()]
        session.run(initializers, {tensor: arrays[name] for tensor, name in fed.items()})
