"""What a config file's network must not do, found in its graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import node_def_pb2

from lm.errors import UserError
from lm.model.context import Cut
from lm.model.variables import operations_behind

Nodes = Mapping[str, node_def_pb2.NodeDef]  # operations by name

_COLLECTED = {
    tf.GraphKeys.REGULARIZATION_LOSSES: "--weight_decay, in the place of a regularizer",
    tf.GraphKeys.TABLE_INITIALIZERS: "tf.gather, from a constant, in the place of a lookup table",
    tf.GraphKeys.LOSSES: "the loss is made for you",
    tf.GraphKeys.UPDATE_OPS: "what is not trained stays as it is; batch normalization mixes rows",
}
_ASSIGNS = re.compile(
    r"Assign.*|ResourceScatter.*|(Resource)?StridedSliceAssign"
    r"|Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update)|(Resource)?((Sparse)?Apply.*|CountUpTo)"
    r"|LmAddToAverage"
)
_OWN_DATA = re.compile(r".*Iterator(V[23])?|.*Queue(V[23])?|Mutable.*Table.*")
PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}


def placeholders() -> set[str]:
    """Return the names of the current graph's placeholders; in a loop's, none: it has its own."""
    graph = tf.get_default_graph()
    if graph.building_function:
        return set()
    return {op.name for op in graph.get_operations() if op.type.startswith("Placeholder")}


def operations() -> Nodes:
    """Return the current graph's operations by name, with those of its loops and conditions."""
    graph = tf.get_default_graph().as_graph_def()
    found = {node.name: node for node in graph.node}
    for body in graph.library.function:
        found.update({f"{body.signature.name}/{node.name}": node for node in body.node_def})
    return found


def refuse(where: str, made: Nodes, used: Mapping[str, tf.Variable], training: bool) -> None:
    """Refuse what would make a run wrong, or another on other ranks.

    Args:
      where: The file and the function.
      made: The operations of the network, from `operations`.
      used: Its variables.
      training: Whether this use of the network is for training.

    Raises:
      UserError: There is something; the message names it, and says what to do instead.
    """
    _refuse_assignments(where, made, used)
    _refuse_data(where, made)
    if training:
        _refuse_collected(where)
        _refuse_graph_seed(where)
        _refuse_global_step(where, made, used)


def refuse_cuts_of_others(where: str, cuts: Sequence[Cut], given: Sequence[tf.Tensor]) -> None:
    """Refuse a cut of what is not made of variables alone: ranks would get other gradients.

    Args:
      where: The file and the function.
      cuts: Of the network's context.
      given: The words and the state.

    Raises:
      UserError: There is one.
    """
    used = [cut.used for cut in cuts]
    for cut in cuts:
        if operations_behind(cut.weights) & {tensor.op for tensor in [*given, *used]}:
            raise UserError(
                f"{where} calls context.drop_weights with {cut.weights.op.name}, which depends on"
                " the words, the state or dropped weights: it must be made of variables alone"
            )


def warnings_of(
    where: str, made: Nodes, state: Mapping[str, tf.Tensor], results: Sequence[tf.Tensor]
) -> Iterator[str]:
    """Tell what may make a run, or what reads its words one by one, another.

    Args:
      where: The file and the function.
      made: The operations of the network, from `operations`.
      state: What it was given.
      results: What it has returned, and its penalties.

    Yields:
      A line for each.
    """
    unread = [name for name, before in state.items() if not before.consumers()]
    if unread:
        yield (
            f"{where} does not read state[{unread[0]!r}]: nothing of it passes from window to"
            " window, nor from word to word in lm.score, lm.generate and lm.export"
        )
    computed = _computed(made, results)
    # A seed of their own helps with the next run only: what they draw depends on how often they
    # have, and they draw the same on each rank, for other rows.
    draws = [node.op for node in computed if "seed2" in node.attr]
    if draws:
        yield (
            f"{where} draws numbers with {draws[0]}: the next run, or this one on other ranks or"
            " resumed, may draw others; for dropout use context.dropout"
        )
    # Python without a state has promised to be a function.
    python = [node.op for node in computed if node.op in PYTHON_OPS - {"PyFuncStateless"}]
    if python:
        yield (
            f"{where} runs Python ({python[0]}): if it draws numbers or remembers, the next run, or"
            " this one on other ranks or resumed, is another; if it does not, say stateful=False"
        )


def _computed(made: Nodes, results: Sequence[tf.Tensor]) -> list[node_def_pb2.NodeDef]:
    """Return the operations that results are made of, with all of loops and conditions.

    Without those of initial values, which are drawn once, or by later calls never.
    """
    behind = {op.name for op in operations_behind(*results)}
    here = {op.name for op in tf.get_default_graph().get_operations()}
    return [node for name, node in made.items() if name in behind or name not in here]


def _refuse_collected(where: str) -> None:
    """Refuse losses and updates that TensorFlow collects, for training loops of other kinds."""
    for name, instead in _COLLECTED.items():
        if tf.get_collection(name):
            raise UserError(
                f"{where} adds to the collection {name}, which nothing uses here: {instead}"
            )


def _refuse_graph_seed(where: str) -> None:
    """Refuse `tf.set_random_seed`, with which initial values would not depend on `--seed`."""
    if tf.get_default_graph().seed is not None:
        raise UserError(f"{where} sets TensorFlow's seed: leave it out, --seed decides everything")


def _refuse_assignments(where: str, made: Nodes, used: Mapping[str, tf.Variable]) -> None:
    """Refuse a network that changes variables: each validation would, and each rank for itself."""
    # Of a variable that starts from a checkpoint, TensorFlow has replaced the first one.
    initializers = {variable.initializer.name for variable in used.values()}
    initializers |= {f"{name}/Assign" for name in used}
    for name, node in made.items():
        if _ASSIGNS.fullmatch(node.op) and name not in initializers:
            raise UserError(
                f"{where} assigns to a variable ({name}): what is not trained stays as it is; what"
                " passes from window to window is the state"
            )


def _refuse_data(where: str, made: Nodes) -> None:
    """Refuse a network that reads data of its own: each rank would read the same for other rows."""
    for name, node in made.items():
        if _OWN_DATA.fullmatch(node.op):
            raise UserError(
                f"{where} has {node.op} ({name}): each rank would read the same from it, and a"
                " resumed run from its start; what a network reads is inputs_TB"
            )


def _refuse_global_step(where: str, made: Nodes, used: Mapping[str, tf.Variable]) -> None:
    """Refuse a network that goes by the global step, which there is none of after training."""
    step, graph = tf.train.get_global_step(), tf.get_default_graph()
    if step is None:
        return
    its = {step.op, tf.convert_to_tensor(step).op}
    reads = any(
        tensor.op in its for op in graph.get_operations() if op.name in made for tensor in op.inputs
    )
    if reads or step.op.name in used:
        raise UserError(
            f"{where} uses the global step: context.step is that of training, and None elsewhere"
        )
