"""Copy weights and recurrent state from a session into arrays, and back."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint.store import weight_tensors
from lm.checkpoint.tensors import Part, model_path, read_errors, slice_spec, tensor_shapes
from lm.errors import UserError

_PART_BYTES = 8 << 20  # largest part of a variable in memory, except for a single row

# Both mappings are indexed by the name of the variable.
Arrays = Mapping[str, np.ndarray]
Shapes = Mapping[str, Sequence[int]]
Concat = Callable[[np.ndarray], np.ndarray]  # concatenates the arrays of all ranks along axis 0


def weight_names(graph: tf.Graph) -> tuple[str, ...]:
    """Return the names of all variables of the network, trained or not."""
    return tuple(_weights(graph))


def variable_shapes(graph: tf.Graph) -> dict[str, list[int]]:
    """Return the shapes of the variables that the ranks share, by name."""
    return {name: v.shape.as_list() for name, v in _global_variables(graph).items()}


def saved_state_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int | None]]:
    """Return the shapes of the recurrent state in a checkpoint, with None for the rows."""
    return {_state_name(name): [None, *shape] for name, shape in shapes.items()}


def check_fits(found: Shapes, shapes: Mapping[str, Sequence]) -> None:
    """Check the shapes in a checkpoint against the required shapes; a first axis may be None."""
    for name, shape in shapes.items():
        if name not in found:
            raise UserError(f"the checkpoint has no {name}, which this model needs")
        expected = [found[name][0], *shape[1:]] if shape[:1] == [None] else shape
        if found[name] != expected:
            raise UserError(
                f"{name} has the shape {found[name]} in the checkpoint, but {expected} in this"
                " model"
            )


def fitting_tensors(
    checkpoint: str, weights: Shapes, is_part: bool = False, fix: str = ""
) -> dict[str, str]:
    """Return the name of the tensor of each weight: its average if the checkpoint has one.

    Args:
      weights: The shapes of the model's weights.
      is_part: Whether the model may lack weights of the checkpoint.
      fix: The end of the message if the model lacks a weight.
    """
    tensors, shapes = weight_tensors(checkpoint), tensor_shapes(checkpoint)
    unused = sorted(tensors.keys() - weights.keys())
    if unused and not is_part:
        raise UserError(f"{checkpoint} has {unused[0]}, which this model does not use{fix}")
    check_fits({name: shapes[name] for name in tensors}, weights)
    return {name: tensors[name] for name in weights}


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
                if _is_large(variable)
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
            for first, end in _row_ranges(variable):
                rows = session.run(self._rows[name], {self._range_ph: [first, end]})
                yield Part(name, rows, variable.shape.as_list(), first)


class VariableLoader:
    """Sets variables to the tensors of a checkpoint.

    The rows of a large variable are replaced in place, so that loading needs little memory. Create
    the loader in the graph of the variables, before the graph is finalized.
    """

    def __init__(self) -> None:
        self._variables = _global_variables(tf.get_default_graph())
        self._load_ops = {}
        with tf.name_scope("lm_loader"):
            self._path_ph = tf.placeholder(tf.string, [], "path")
            self._tensor_ph = tf.placeholder(tf.string, [1], "tensor")
            self._slice_ph = tf.placeholder(tf.string, [1], "slice")
            self._range_ph = tf.placeholder(tf.int32, [2], "range")
            rows = tf.range(self._range_ph[0], self._range_ph[1])
            for name, variable in self._variables.items():
                with tf.device("cpu:0"):
                    (value,) = tf.raw_ops.RestoreV2(
                        prefix=self._path_ph,
                        tensor_names=self._tensor_ph,
                        shape_and_slices=self._slice_ph,
                        dtypes=[variable.dtype.base_dtype],
                    )
                if _is_large(variable):
                    self._load_ops[name] = tf.scatter_update(variable, rows, value).op
                else:
                    self._load_ops[name] = variable.assign(value, read_value=False)

    def load(self, session: tf.Session, checkpoint: str, tensors: Mapping[str, str]) -> None:
        """Set variables. `tensors` contains the name of each variable's tensor."""
        path = model_path(checkpoint)
        with read_errors(checkpoint):
            for name, tensor in tensors.items():
                feed = {self._path_ph: path, self._tensor_ph: [tensor], self._slice_ph: [""]}
                if not _is_large(self._variables[name]):
                    session.run(self._load_ops[name], feed)
                    continue
                shape = self._variables[name].shape.as_list()
                for first, end in _row_ranges(self._variables[name]):
                    feed[self._slice_ph] = [slice_spec(shape, first, end - first)]
                    session.run(self._load_ops[name], {**feed, self._range_ph: [first, end]})

    def load_weights(self, session: tf.Session, checkpoint: str, is_part: bool = False) -> None:
        """Set the weights of the graph; see `fitting_tensors`."""
        weights = {name: v.shape.as_list() for name, v in _weights(session.graph).items()}
        self.load(session, checkpoint, fitting_tensors(checkpoint, weights, is_part))


def _num_bytes(variable: tf.Variable) -> int:
    return math.prod(variable.shape.as_list()) * variable.dtype.size


def _is_large(variable: tf.Variable) -> bool:
    return bool(variable.shape.rank) and _num_bytes(variable) > _PART_BYTES


def _row_ranges(variable: tf.Variable) -> Iterator[tuple[int, int]]:
    """Yield the first row and the end of each part of a variable."""
    num_rows = variable.shape.as_list()[0]
    size = max(1, num_rows * _PART_BYTES // _num_bytes(variable))
    for first in range(0, num_rows, size):
        yield first, min(first + size, num_rows)


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


def _state_name(name: str) -> str:
    return f"state/{name}"


def _weights(graph: tf.Graph) -> dict[str, tf.Variable]:
    return {v.op.name: v for v in graph.get_collection(tf.GraphKeys.MODEL_VARIABLES)}


def _global_variables(graph: tf.Graph) -> dict[str, tf.Variable]:
    # Put the weights first, in the order of their creation, so that equal checkpoints have equal
    # files.
    rest = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    return {**_weights(graph), **{v.op.name: v for v in rest}}
