"""Load the initial values of a run, and the values of a run that is resumed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint.manifest import Checkpoint
from lm.checkpoint.tensors import load_arrays, tensor_shapes
from lm.checkpoint.transfer import (
    VariableLoader,
    check_fits,
    global_variables,
    saved_state_shapes,
    weight_variables,
)
from lm.distributed.agreement import on_all_ranks
from lm.distributed.communicator import Communicator
from lm.errors import UserError


class Table(NamedTuple):
    """A tensor whose rows are loaded selectively, for example one row or column per word."""

    tensor: str  # name in the checkpoint
    axis: int  # the axis of the rows
    saved_ids: Sequence[int]  # the rows in the checkpoint
    ids: Sequence[int]  # the same rows in the run


class InitialValues(NamedTuple):
    """The contents of a checkpoint that initialize a run."""

    checkpoint: str  # directory, or prefix of a checkpoint of a TF 1.x program
    tensors: Mapping[str, str]  # names of tensors, by the name of the variable
    state: Mapping[str, np.ndarray]  # the recurrent state of all rows; empty for a new run
    tables: Mapping[str, Table] = {}  # for each variable
    types: Mapping[str, tf.DType] = {}  # types that differ from the variable


class BroadcastHook(tf.train.SessionRunHook):
    """Loads a checkpoint on rank 0, and broadcasts all variables before the first step.

    The argument `values` is None on all ranks except rank 0. If it is None on rank 0 too, rank 0
    broadcasts the values with which the graph initialized its variables.
    """

    def __init__(self, comm: Communicator, values: InitialValues | None, broadcast: Any):
        self._comm, self._values, self._broadcast = comm, values, broadcast
        self._loader = values and VariableLoader(values.tensors, types=values.types)
        self._tables = values and [_TableLoader(*table) for table in values.tables.items()]

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Set the variables after TensorFlow has created the session."""
        values = self._values
        with on_all_ranks(self._comm):
            if values:
                self._loader.load(session, values.checkpoint, values.tensors)
                for table in self._tables:
                    table.load(session, values.checkpoint)
        session.run(self._broadcast)


class _TableLoader:
    """Sets some rows of a variable. Create the loader before the graph is finalized."""

    def __init__(self, name: str, table: Table):
        self._table = table
        (self._variable,) = (v for v in tf.global_variables() if v.op.name == name)
        with tf.name_scope("lm_loader"):
            self._value_ph = tf.placeholder(self._variable.dtype.base_dtype, self._variable.shape)
            self._assign_op = self._variable.assign(self._value_ph, read_value=False)

    def load(self, session: tf.Session, checkpoint: str) -> None:
        table = self._table
        value = np.array(session.run(self._variable))
        saved = load_arrays(checkpoint, [table.tensor])[table.tensor]
        rows, saved_rows = (np.moveaxis(array, table.axis, 0) for array in (value, saved))
        rows[table.ids] = saved_rows[table.saved_ids]
        session.run(self._assign_op, {self._value_ph: value})


def values_to_resume(
    checkpoint: Checkpoint, state_shapes: Mapping[str, Sequence[int]]
) -> InitialValues:
    """Return the values of all variables of the current graph, and the recurrent state."""
    graph = tf.get_default_graph()
    unused = set(checkpoint.manifest.weights).difference(weight_variables(graph))
    if unused:  # possible with --allow_changed_config_file
        raise UserError(
            f"cannot resume: this network does not use {min(unused)} of the checkpoint. Start a new"
            " run with --init_from and --init_partly"
        )
    variables = {name: v.shape.as_list() for name, v in global_variables(graph).items()}
    state = saved_state_shapes(state_shapes)
    check_fits(checkpoint.path, tensor_shapes(checkpoint.path), {**variables, **state})
    names = {name: name for name in variables}
    return InitialValues(checkpoint.path, names, load_arrays(checkpoint.path, state))
