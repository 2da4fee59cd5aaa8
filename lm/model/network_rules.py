"""Rules that the functions and the graph of a user's network must follow.

The checks raise a UserError that names the file and the function (`where`). `made` contains the
operations of the network, and `used` contains its variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import node_def_pb2

from lm.config import Config
from lm.errors import UserError
from lm.model.context import Context
from lm.model.user_errors import PYTHON_OPS
from lm.model.variables import operations_behind

Nodes = Mapping[str, node_def_pb2.NodeDef]  # operations by name

_COLLECTED = {
    tf.GraphKeys.REGULARIZATION_LOSSES: "use --weight_decay instead of a regularizer",
    tf.GraphKeys.TABLE_INITIALIZERS: "use tf.gather from a constant instead of a lookup table",
    tf.GraphKeys.LOSSES: "the trainer computes the loss",
    tf.GraphKeys.UPDATE_OPS: "only trainable variables change; batch normalization mixes rows",
}
_ASSIGNS = re.compile(
    r"Assign.*|ResourceScatter.*|(Resource)?StridedSliceAssign"
    r"|Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update)|(Resource)?((Sparse)?Apply.*|CountUpTo)"
    r"|LmAddToAverage"
)


def checked_shapes(path: str, found: Any) -> dict[str, list[int]]:
    """Return the result of `state_shapes`: a dictionary from names to lists of sizes."""
    where = f"{path}: state_shapes must return names with lists of sizes, such as {{'h': [200]}}"
    if not isinstance(found, Mapping):
        raise UserError(f"{where}, not {found!r}")
    for name, shape in found.items():
        if not isinstance(shape, (list, tuple)) or not all(
            type(size) is int and size > 0 for size in shape
        ):
            raise UserError(f"{where}; the shape of {name!r} is {shape!r}")
    return {name: list(shape) for name, shape in found.items()}


def checked_result(
    where: str,
    found: Any,
    what: str,
    shape: Sequence[int | None],
    state_shapes: Mapping[str, Sequence[int]],
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Return the result of `build_outputs` or `build_logits` with known shapes.

    If a shape is unknown before the run, the graph checks it. `what` is "outputs" or "logits".
    `shape` is the expected shape. None means an unknown B, or any known number of units.
    """
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise UserError(f"{where} must return ({what}, new_state), not {_described(found)}")
    top, state = found
    top = _checked_tensor(where, what, top, shape)
    if top.shape.as_list()[-1] is None:
        raise UserError(f"{where}: the size of the last axis of {what} must be known")
    if not isinstance(state, Mapping):
        raise UserError(f"{where}: new_state must be a dictionary, not {_described(state)}")
    expected, names = sorted(state_shapes), sorted(map(str, state))
    if names != expected:
        raise UserError(f"{where}: new_state has {names}, but state_shapes has {expected}")
    return top, {
        name: _checked_tensor(where, f"new_state[{name!r}]", part, [shape[1], *state_shapes[name]])
        for name, part in state.items()
    }


def _checked_tensor(where: str, what: str, found: Any, shape: Sequence[int | None]) -> tf.Tensor:
    if not _is_tensor(found):
        raise UserError(f"{where}: {what} must be a tensor, not {_described(found)}")
    if found.dtype.base_dtype != tf.float32:
        raise UserError(f"{where}: {what} must be float32, not {found.dtype.base_dtype.name}")
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


def tied_table(
    where: str, tables: Sequence[tf.Variable], vocab_size: int, makes_logits: bool
) -> tf.Variable:
    """Return the embedding table that `tie_weights` ties to the output layer."""
    if makes_logits:
        raise UserError(f"{where} builds its own output layer, so tie_weights cannot tie it")
    if len(tables) != 1:
        names = ", ".join(sorted(table.op.name for table in tables)) or "none"
        raise UserError(
            f"{where}: tie_weights needs exactly one table of context.embed(inputs_TB), not"
            f" {names}: give the other tables a name"
        )
    (table,) = tables
    if table.shape.rank != 2 or table.shape[0] != vocab_size:
        raise UserError(
            f"{where}: tie_weights needs a variable embedding of shape ({vocab_size}, any), not"
            f" {table.shape}"
        )
    return table


def check_graph(where: str, made: Nodes, used: Mapping[str, tf.Variable]) -> None:
    """Reject assignments and placeholders in any use of the network."""
    # Inside a loop, the inputs of the loop are placeholders too.
    in_loop = tf.get_default_graph().building_function
    # tf.train.init_from_checkpoint replaces the first initializer of a variable.
    initializers = {variable.initializer.name for variable in used.values()}
    initializers |= {f"{name}/Assign" for name in used}
    for name, node in made.items():
        # Each validation would assign too, and each rank separately.
        if _ASSIGNS.fullmatch(node.op) and name not in initializers:
            raise UserError(
                f"{where} assigns to a variable ({name}), but only trainable variables change; use"
                " the state to carry values from window to window"
            )
        if node.op.startswith("Placeholder") and not in_loop:
            raise UserError(
                f"{where} creates the placeholder {name}, which receives no value: use"
                " context.training, or a field of context.config"
            )


def check_training(
    where: str, made: Nodes, used: Mapping[str, tf.Variable], context: Context, given: Sequence
) -> None:
    """Reject a network that cannot be trained or that ignores a setting.

    `given` contains the token IDs and the state that the network received.
    """
    for name, instead in _COLLECTED.items():
        if tf.get_collection(name):
            raise UserError(f"{where} adds to the collection {name}, which is not used: {instead}")
    if tf.get_default_graph().seed is not None:
        raise UserError(f"{where} sets TensorFlow's seed: remove it, --seed decides everything")
    _check_global_step(where, made, used)
    _check_calls(where, context.config, context)
    dropped = [reduction.used for reduction in context.separate_reductions]
    for reduction in context.separate_reductions:
        if operations_behind(reduction.weights) & {tensor.op for tensor in [*given, *dropped]}:
            raise UserError(
                f"{where} calls context.drop_weights with {reduction.weights.op.name}, which"
                " depends on the words, the state or dropped weights: compute it from variables"
                " only"
            )


def _check_global_step(where: str, made: Nodes, used: Mapping[str, tf.Variable]) -> None:
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
    if reads or step.op.name in used:
        raise UserError(
            f"{where} uses the global step, which exists only in training: use context.step"
        )


def _check_calls(where: str, config: Config, context: Context) -> None:
    penalty = config.activation_penalty
    if config.num_steps > 1:
        penalty = penalty or config.temporal_activation_penalty
    if penalty and not context.penalties:
        raise UserError(
            f"{where} does not call context.penalize, which activation_penalty and"
            " temporal_activation_penalty need"
        )
    if config.recurrent_keep_prob < 1 and not context.separate_reductions:
        raise UserError(
            f"{where} does not call context.drop_weights, which recurrent_keep_prob needs"
        )


def warnings_of(
    where: str, made: Nodes, state: Mapping[str, tf.Tensor], results: Sequence[tf.Tensor]
) -> Iterator[str]:
    """Yield a warning for each reason why results may not be reproducible.

    `state` is the state that the network received, and `results` includes the penalties.
    """
    unread = [name for name, before in state.items() if not before.consumers()]
    if unread:
        yield (
            f"{where} does not read state[{unread[0]!r}]: the network forgets it after each window,"
            " and after each word in lm.score, lm.generate and lm.export"
        )
    computed = _computed(made, results)
    # Even with a seed, the numbers depend on the number of previous runs of the operation, and all
    # ranks draw the same numbers for different rows.
    draws = [node.op for node in computed if "seed2" in node.attr]
    if draws:
        yield (
            f"{where} draws random numbers with {draws[0]}, which are not reproducible: use"
            " context.dropout for dropout"
        )
    python = [node.op for node in computed if node.op in PYTHON_OPS - {"PyFuncStateless"}]
    if python:
        yield (
            f"{where} runs Python code ({python[0]}), so results may not be reproducible: if the"
            " code has no state and draws no random numbers, declare it with stateful=False"
        )


def _computed(made: Nodes, results: Sequence[tf.Tensor]) -> list[node_def_pb2.NodeDef]:
    """Return the operations behind the results, except operations of initial values.

    All operations of loops and conditions are included.
    """
    behind = {op.name for op in operations_behind(*results)}
    here = {op.name for op in tf.get_default_graph().get_operations()}
    return [node for name, node in made.items() if name in behind or name not in here]
