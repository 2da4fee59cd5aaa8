"""Copy weights and recurrent state from a session into arrays, and back."""

import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint.manifest import Checkpoint
from lm.checkpoint.tensors import (
    Group,
    Part,
    model_path,
    read_errors,
    tensor_shapes,
    weight_tensors,
    whole,
)
from lm.errors import UserError

# The largest group of variables that is read, or loaded, at one time.
READ_BYTES, LOADED_BYTES = 128 << 20, 32 << 20

# Both mappings are indexed by the name of the variable.
Arrays = Mapping[str, np.ndarray]
Shapes = Mapping[str, Sequence[int]]
Concat = Callable[[np.ndarray], np.ndarray]  # concatenates the arrays of all ranks along axis 0


def weight_variables(graph: tf.Graph) -> dict[str, tf.Variable]:
    """Return all variables of the network, trained or not, by name."""
    return {v.op.name: v for v in graph.get_collection(tf.GraphKeys.MODEL_VARIABLES)}


def global_variables(graph: tf.Graph) -> dict[str, tf.Variable]:
    """Return the variables that the ranks share, by name."""
    # Put the weights first, in the order of their creation, so that equal checkpoints have equal
    # files.
    rest = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    return {**weight_variables(graph), **{v.op.name: v for v in rest}}


def saved_state_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int | None]]:
    """Return the shapes of the recurrent state in a checkpoint, with None for the rows."""
    return {_state_name(name): [None, *shape] for name, shape in shapes.items()}


def check_fits(path: str, found: Shapes, shapes: Mapping[str, Sequence], fix: str = "") -> None:
    """Check the shapes in a checkpoint against the required shapes; a first axis may be None."""
    for name, shape in shapes.items():
        if name not in found:
            raise UserError(f"{path} has no {name}, which this model needs{fix}")
        expected = [found[name][0], *shape[1:]] if shape[:1] == [None] else shape
        if found[name] != expected:
            raise UserError(
                f"{name} has the shape {found[name]} in {path}, but {expected} in this model{fix}"
            )


def fitting_tensors(
    checkpoint: Checkpoint, weights: Shapes, is_part: bool = False, fix: str = ""
) -> dict[str, str]:
    """Return the name of the tensor of each weight: its average if the checkpoint has one.

    Args:
      weights: The shapes of the model's weights.
      is_part: Whether the model may lack weights of the checkpoint.
      fix: The end of the message if the weights do not fit.
    """
    tensors, shapes = weight_tensors(checkpoint), tensor_shapes(checkpoint.path)
    unused = sorted(tensors.keys() - weights.keys())
    if unused and not is_part:
        raise UserError(f"{checkpoint.path} has {unused[0]}, which this model does not use{fix}")
    check_fits(checkpoint.path, {name: shapes[name] for name in tensors}, weights, fix)
    return {name: tensors[name] for name in weights}


class _Rows(NamedTuple):
    """Consecutive rows of a variable, or the whole variable."""

    name: str
    shape: tuple[int, ...]  # shape of the whole variable
    first_row: int
    num_rows: int
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        return not self.shape or self.num_rows == self.shape[0]

    @property
    def slice_spec(self) -> str:
        """The rows in the notation of SaveV2 and RestoreV2, or "" for the whole variable."""
        if self.is_whole:
            return ""
        slices = [f"{self.first_row},{self.num_rows}", *["-"] * (len(self.shape) - 1)]
        return " ".join([*map(str, self.shape), ":".join(slices)])

    def indices(self) -> tf.Tensor:
        return tf.range(self.first_row, self.first_row + self.num_rows)


def _rows_tensor(rows: _Rows, variable: tf.Variable) -> tf.Variable | tf.Tensor:
    return variable if rows.is_whole else variable.sparse_read(rows.indices())


def _divide(
    variables: Mapping[str, tf.Variable], group_bytes: int, undivided: Container[str] = ()
) -> Iterator[_Rows]:
    """Divide variables that are larger than a group, but not their rows."""
    for name, variable in variables.items():
        shape = tuple(variable.shape.as_list())
        num_rows, row_bytes = (*shape, 1)[0], math.prod(shape[1:]) * variable.dtype.size
        size = max(1, group_bytes // max(1, row_bytes), num_rows * (name in undivided))
        for first in range(0, max(1, num_rows), size):  # once for a variable without rows
            count = min(size, num_rows - first)
            yield _Rows(name, shape, first, count, count * row_bytes)


def _grouped(all_rows: Iterable[_Rows], group_bytes: int) -> Iterator[list[_Rows]]:
    """Collect consecutive rows into groups of at most `group_bytes`, or of single rows."""
    group, num_bytes = [], 0
    for rows in all_rows:
        if group and num_bytes + rows.num_bytes > group_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(rows)
        num_bytes += rows.num_bytes
    if group:
        yield group


class VariableReader:
    """Reads the variables that all ranks share: weights, optimizer slots, global step.

    Variables are read in groups, because TensorFlow compiles the graph again for each new set of
    fetches, and because a save must need little memory. Create the reader in the graph of the
    variables, before the graph is finalized.
    """

    def __init__(self):
        variables = global_variables(tf.get_default_graph())
        with tf.name_scope("lm_reader"):
            self._groups = [
                [(rows, _rows_tensor(rows, variables[rows.name])) for rows in group]
                for group in _grouped(_divide(variables, READ_BYTES), READ_BYTES)
            ]

    def groups(self, session: tf.Session, others: Arrays | None = None) -> Iterator[Group]:
        """Yield all variables, and other arrays with the last group.

        The arrays may share their memory with the variables, so no variable may change while a
        group is in use.
        """
        for number, group in enumerate(self._groups, start=1):
            arrays = session.run([tensor for _, tensor in group])
            parts = [
                Part(rows.name, array, rows.slice_spec) for (rows, _), array in zip(group, arrays)
            ]
            yield parts if number < len(self._groups) else [*parts, *whole(others or {})]


class VariableLoader:
    """Sets variables, by default all weights, to the tensors of a checkpoint.

    One operation loads one group after the other. A variable that is larger than a group is
    replaced in place, so that loading needs little memory. Create the loader in the graph of the
    variables, before the graph is finalized.

    Args:
      types: The types of tensors whose type differs from the type of the variable, by variable.

    Attributes:
      create_op: Gives memory to the variables that are loaded in place. Run this operation before
        loading if the variables are not initialized.
    """

    def __init__(
        self, names: Iterable[str] | None = None, types: Mapping[str, tf.DType] | None = None
    ):
        graph, self._types = tf.get_default_graph(), types or {}
        found = global_variables(graph)
        chosen = weight_variables(graph) if names is None else names
        variables = {name: found[name] for name in chosen}
        # TensorFlow cannot read some rows of a tensor of type float16.
        all_rows = _divide(variables, LOADED_BYTES, undivided=self._types)
        groups = list(_grouped(all_rows, LOADED_BYTES))
        with tf.name_scope("lm_loader"):
            self._path_ph = tf.placeholder(tf.string, [], "path")
            self._tensor_phs = {name: tf.placeholder(tf.string, [1]) for name in variables}
            done: list[tf.Operation] = []
            for group in groups:
                with tf.control_dependencies(done):
                    done = [self._load(rows, variables[rows.name]) for rows in group]
            self._load_op = tf.group(*done)
            in_place = {rows.name for group in groups for rows in group if not rows.is_whole}
            self.create_op = tf.group(
                *[v.assign(tf.zeros(v.shape, v.dtype)).op for v in map(variables.get, in_place)]
            )

    def _load(self, rows: _Rows, variable: tf.Variable) -> tf.Operation:
        with tf.device("cpu:0"):
            (value,) = tf.raw_ops.RestoreV2(
                prefix=self._path_ph,
                tensor_names=self._tensor_phs[rows.name],
                shape_and_slices=[rows.slice_spec],
                dtypes=[self._types.get(rows.name, variable.dtype.base_dtype)],
            )
            value = tf.cast(value, variable.dtype.base_dtype)
        if rows.is_whole:
            return variable.assign(value, read_value=False)
        update_op = tf.scatter_update(variable, rows.indices(), value).op
        # After a sparse update, TensorFlow copies the variable at each read, until told otherwise.
        with tf.control_dependencies([update_op]):
            return tf.raw_ops.DisableCopyOnRead(resource=variable.handle)

    def load(self, session: tf.Session, checkpoint: str, tensors: Mapping[str, str]) -> None:
        """Set the variables of the loader. `tensors` has the name of each variable's tensor."""
        names = {ph: [tensors[name]] for name, ph in self._tensor_phs.items()}
        with read_errors(checkpoint):
            session.run(self._load_op, {self._path_ph: model_path(checkpoint), **names})

    def load_weights(
        self, session: tf.Session, checkpoint: Checkpoint, is_part: bool = False
    ) -> None:
        """Set all weights; see `fitting_tensors`."""
        weights = {name: v.shape.as_list() for name, v in weight_variables(session.graph).items()}
        self.load(session, checkpoint.path, fitting_tensors(checkpoint, weights, is_part))


def first_not_finite(graph: tf.Graph, groups: Iterable[Group]) -> str | None:
    """Return the name of the first array that training made NaN or infinite, or None."""
    trained = {v.op.name for v in graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)}
    untrained = weight_variables(graph).keys() - trained  # for example, a mask may contain -inf
    for name, array, *_ in itertools.chain.from_iterable(groups):
        if array.size == 0:
            continue
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
