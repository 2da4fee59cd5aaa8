"""Rules that the functions and the graph of a user's network must follow.

The checks raise a UserError that names the file and the function (`where`). `made` contains the
operations of the network, and `used` contains its variables.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import node_def_pb2

from lm.errors import UserError
from lm.model.context import Context, VariableUpdate
from lm.model.user_errors import PYTHON_OPS
from lm.model.variables import operations_behind

Nodes = Mapping[str, node_def_pb2.NodeDef]  # operations by name
Table = TypeVar("Table")

_STATE_TYPES = ("float32", "int32")
_COLLECTED = {
    tf.GraphKeys.TABLE_INITIALIZERS: "use tf.gather from a constant instead of a lookup table",
    tf.GraphKeys.LOSSES: "use context.add_loss",
}
_ASSIGNS = re.compile(
    r"Assign.*|ResourceScatter.*|(Resource)?StridedSliceAssign"
    r"|Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update)|(Resource)?((Sparse)?Apply.*|CountUpTo)"
    r"|LmAddToAverage"
)
_DRAWS_NOTHING = {"ComputeAccidentalHits"}  # of tf.nn.sampled_softmax_loss, although it has seeds
# The change of a variable by an assignment of a value.
_CHANGES = {
    "AssignVariableOp": lambda variable, value: value - variable.read_value(),
    "AssignAddVariableOp": lambda variable, value: value,
    "AssignSubVariableOp": lambda variable, value: -value,
}


def checked_state(path: str, found: Any) -> dict[str, tuple[list[int], str]]:
    """Return the result of `state_shapes`: sizes and types by name."""
    where = (
        f"{path}: state_shapes must return names with lists of sizes, such as {{'h': [200]}} or"
        " {'ids': ([3], 'int32')}"
    )
    if not isinstance(found, Mapping):
        raise UserError(f"{where}, not {found!r}")
    state = {}
    for name, part in found.items():
        has_type = isinstance(part, tuple) and len(part) == 2 and part[1] in _STATE_TYPES
        shape, dtype = part if has_type else (part, "float32")
        if not isinstance(shape, (list, tuple)) or not all(
            type(size) is int and size > 0 for size in shape
        ):
            raise UserError(f"{where}; the shape of {name!r} is {part!r}")
        state[name] = list(shape), dtype
    return state


def checked_result(
    where: str,
    found: Any,
    what: str,
    shape: Sequence[int | None],
    state_parts: Mapping[str, tuple[Sequence[int], str]],
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Return the result of a function of the network with known shapes.

    If a shape is unknown before the run, the graph checks it. `what` is "outputs", "logits" or
    "losses". `shape` is the expected shape. None means an unknown B, or any number of units.
    """
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise UserError(f"{where} must return ({what}, new_state), not {_described(found)}")
    top, state = found
    top = _checked_tensor(where, what, top, shape)
    if what == "outputs" and top.shape.as_list()[-1] is None:
        raise UserError(f"{where}: the size of the last axis of {what} must be known")
    if not isinstance(state, Mapping):
        raise UserError(f"{where}: new_state must be a dictionary, not {_described(state)}")
    expected, names = sorted(state_parts), sorted(map(str, state))
    if names != expected:
        raise UserError(f"{where}: new_state has {names}, but state_shapes has {expected}")
    return top, {
        name: _checked_tensor(where, f"new_state[{name!r}]", state[name], [shape[1], *sizes], dtype)
        for name, (sizes, dtype) in state_parts.items()
    }


def _checked_tensor(
    where: str, what: str, found: Any, shape: Sequence[int | None], dtype: str = "float32"
) -> tf.Tensor:
    if not _is_tensor(found):
        raise UserError(f"{where}: {what} must be a tensor, not {_described(found)}")
    if found.dtype.base_dtype != dtype:
        raise UserError(f"{where}: {what} must be {dtype}, not {found.dtype.base_dtype.name}")
    text = f"({', '.join('any' if size is None else str(size) for size in shape)})"
    if not found.shape.is_compatible_with(shape):
        raise UserError(f"{where}: {what} must have the shape {text}, not {found.shape}")
    known = found.shape.merge_with(shape)
    return found if known.as_list() == found.shape.as_list() else tf.ensure_shape(found, known)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (tf.Tensor, tf.Variable))  # excludes sparse and ragged tensors


def _described(value: Any) -> str:
    if _is_tensor(value):
        return f"a tensor of shape {value.shape}"
    many = isinstance(value, (tuple, list))
    return f"{len(value)} values" if many else f"a {type(value).__name__}"


def operations() -> Nodes:
    """Return all operations of the current graph, its loops and its conditions by name."""
    graph = tf.get_default_graph().as_graph_def()
    found = {node.name: node for node in graph.node}
    for body in graph.library.function:
        found.update({f"{body.signature.name}/{node.name}": node for node in body.node_def})
    return found


def check_variables(
    where: str,
    used: Mapping[str, tf.Variable],
    created: set[str],
    reserved: set[str],
    first_used: set[str],
) -> None:
    """Check that all uses of a network use the same variables, from tf.get_variable."""
    for name in sorted(created - used.keys()):
        raise UserError(
            f"{where} creates {name} again at each call: use tf.get_variable, which creates a"
            " variable only once"
        )
    for name in sorted(used.keys() & reserved):
        is_state = name.startswith("state/")
        owner = "the recurrent state in a checkpoint" if is_state else "the output layer"
        raise UserError(f"{where} has the variable {name}, a name of {owner}: rename it")
    for name in sorted(first_used.symmetric_difference(used)):
        raise UserError(
            f"{where} uses the variable {name} in some calls only (training, evaluation or single"
            " words): all calls must use the same variables (create the variables of a tf.function"
            " at the top of the file in the network function)"
        )


def only_table(where: str, setting: str, tables: Mapping[str, Table]) -> Table:
    """Return the embedding table of a network, or raise UserError if it has none or several."""
    if len(tables) != 1:
        raise UserError(
            f"{where}: {setting} needs exactly one table of context.embed(inputs_TB), not"
            f" {', '.join(sorted(tables)) or 'none'}: give the other tables a name"
        )
    (only,) = tables.values()
    return only


def check_rows(where: str, table: tf.Variable, vocab_size: int) -> None:
    """Check that a table can be tied to the output layer."""
    if table.shape.rank != 2 or table.shape[0] != vocab_size:
        raise UserError(
            f"{where}: tie_weights needs a variable embedding of shape ({vocab_size}, any), not"
            f" {table.shape}"
        )


def add_regularization(context: Context) -> None:
    """Add the losses of the regularizers of variables."""
    for loss in tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES):
        context.add_loss(loss)


def find_updates(
    where: str, made: Nodes, used: Mapping[str, tf.Variable], context: Context
) -> list[VariableUpdate]:
    """Return the changes of untrained variables by the assignments in UPDATE_OPS.

    The assignments themselves are never executed: the trainer averages the changes over the global
    batch and applies them once per step.
    """
    variables = {variable.handle.op.name: variable for variable in used.values()}
    found: dict[str, VariableUpdate] = {}
    update_ops = tf.get_collection_ref(tf.GraphKeys.UPDATE_OPS)
    executed = operations_behind(*update_ops, control_inputs=True)
    assignments = [op for op in executed if op.name in made and _ASSIGNS.fullmatch(op.type)]
    for op in sorted(assignments, key=lambda op: op.name):
        variable = variables.get(op.inputs[0].op.name)
        name = op.inputs[0].op.name if variable is None else variable.op.name
        if (
            variable is None or variable.trainable or variable.dtype.base_dtype != tf.float32
            or name in found or op.type not in _CHANGES
        ):  # fmt: skip
            raise UserError(
                f"{where} adds {op.name} to UPDATE_OPS, which updates {name}: an update must be the"
                " only assign, assign_add or assign_sub of an untrained float32 variable"
            )
        change = _CHANGES[op.type](variable, op.inputs[1]) * context.share_of_batch
        found[name] = VariableUpdate(variable, change)
    update_ops.clear()  # the collection belongs to the graph, which may contain further uses
    return list(found.values())


def check_operations(
    where: str, made: Nodes, used: Mapping[str, tf.Variable], results: Sequence[tf.Tensor]
) -> None:
    """Reject assignments that would be executed, and placeholders, in any use of the network."""
    _check_global_step(where, made)
    # Inside a loop, the inputs of the loop are placeholders too.
    in_loop = tf.get_default_graph().building_function
    executed = {op.name for op in operations_behind(*results, control_inputs=True)}
    here = {op.name for op in tf.get_default_graph().get_operations()}
    # tf.train.init_from_checkpoint replaces the first initializer of a variable.
    initializers = {variable.initializer.name for variable in used.values()}
    initializers |= {f"{name}/Assign" for name in used}
    for name, node in made.items():
        # Each evaluation would assign too, and each rank separately. Functions of loops and
        # conditions are not operations of the graph.
        is_executed = name in executed or name not in here
        if _ASSIGNS.fullmatch(node.op) and is_executed and name not in initializers:
            raise UserError(
                f"{where} assigns to a variable ({name}): use the state to carry values from window"
                " to window, or add the assignment to the collection UPDATE_OPS and let nothing"
                " depend on it"
            )
        if node.op == "Placeholder" and is_executed and not in_loop:
            raise UserError(
                f"{where} uses the placeholder {name}, which receives no value: use"
                " context.training or a field of context.config, or pass a value to tf1.fed"
            )


def check_training(where: str, context: Context) -> None:
    """Reject a network that cannot be trained or that ignores a setting."""
    for name, instead in _COLLECTED.items():
        if tf.get_collection(name):
            raise UserError(f"{where} adds to the collection {name}, which is not used: {instead}")
    if tf.get_default_graph().seed is not None:
        raise UserError(f"{where} sets TensorFlow's seed: remove it, --seed decides everything")
    config, penalty = context.config, context.config.activation_penalty
    if config.num_steps > 1:
        penalty = penalty or config.temporal_activation_penalty
    if penalty and "penalize" not in context.called:
        raise UserError(
            f"{where} does not call context.penalize, which activation_penalty and"
            " temporal_activation_penalty need"
        )
    if config.recurrent_keep_prob < 1 and "drop_weights" not in context.called:
        raise UserError(
            f"{where} does not call context.drop_weights, which recurrent_keep_prob needs"
        )


def _check_global_step(where: str, made: Nodes) -> None:
    step, graph = tf.train.get_global_step(), tf.get_default_graph()
    if step is None:
        return
    reads_step = {step.op, tf.convert_to_tensor(step).op}
    reads = any(
        tensor.op in reads_step
        for op in graph.get_operations()
        if op.name in made
        for tensor in op.inputs
    )
    if reads:
        raise UserError(
            f"{where} uses the global step, which exists only in training: use context.step"
        )


def why_irreproducible(made: Nodes, results: Sequence[tf.Tensor | tf.Operation]) -> str:
    """Return the reason why results can differ between runs, or an empty string."""
    behind = {op.name for op in operations_behind(*results, control_inputs=True)}
    here = {op.name for op in tf.get_default_graph().get_operations()}
    for name, node in made.items():
        if name in here and name not in behind:
            continue  # computes an initial value; loops and conditions have separate graphs
        # Even with a seed, the numbers depend on the number of previous runs of the operation.
        if "seed2" in node.attr and node.op not in _DRAWS_NOTHING:
            return (
                f"draws random numbers with {node.op}, which are not reproducible: use"
                " context.dropout for dropout, or tf.random.stateless_* with context.seed()"
            )
        if node.op in PYTHON_OPS - {"PyFuncStateless"}:
            return (
                f"runs Python code ({node.op}), so results may not be reproducible: if the code has"
                " no state and draws no random numbers, declare it with stateful=False"
            )
    return ""
