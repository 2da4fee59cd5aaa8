"""The audit of a user's network: rules that its functions and its graph must follow.

The checks raise a UserError that names the file and the function (`where`), and the line if it is
known. `made` contains the operations of the network, and `used` contains its variables.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import node_def_pb2

from lm import logger
from lm.errors import UserError
from lm.functions import Audit
from lm.model.context import Context, VariableUpdate, collected
from lm.model.network import Built, Network
from lm.model.variables import check_no_graph_seed, operations_behind
from lm.user.code import place
from lm.user.failures import PYTHON_OPS, hint_for_words
from lm.user.returned import checked_result, checked_state
from lm.user.rounding import products_in
from lm.user.update import UserUpdate

Nodes = Mapping[str, node_def_pb2.NodeDef]  # operations by name

_COLLECTED = {
    tf.GraphKeys.TABLE_INITIALIZERS: "use tf.gather from a constant instead of a lookup table",
    tf.GraphKeys.LOSSES: "use context.add_loss",
}
_ASSIGNS = re.compile(
    r"Assign.*|ResourceScatter.*|(Resource)?StridedSliceAssign"
    r"|Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update)|(Resource)?((Sparse)?Apply.*|CountUpTo)"
)
_READS_INPUTS = re.compile(r"Queue.*Dequeue.*|IteratorGetNext.*")
_DRAWS_NOTHING = {"ComputeAccidentalHits", "AllCandidateSampler"}  # although they have seeds
# The change of a variable by an assignment of a value.
_CHANGES = {
    "AssignVariableOp": lambda variable, value: value - variable.read_value(),
    "AssignAddVariableOp": lambda variable, value: value,
    "AssignSubVariableOp": lambda variable, value: -value,
}


class UserAudit(Audit):
    """Checks the calls of the functions of a user-defined network while a graph is built."""

    def __init__(self, network: Network):
        self._network, self._path = network, network.where
        # The variables of the first call of each function: all of them, and the unused ones.
        self._first_used: dict[str, tuple[set[str], set[str]]] = {}
        self._lost: dict[str, str] = {}  # see find_lost_assignments

    def state_parts(self, found: Any) -> dict[str, tuple[list[int], str]]:
        return checked_state(self._path, found)

    def build(
        self,
        build: Callable[[], tuple[Any, Mapping[str, tf.Variable]]],
        name: str,
        shape: Sequence[int | None],
        inputs_TB: tf.Tensor,
        context: Context,
    ) -> Built:
        where, state_parts = f"{self._path}: {name}", self._network.state_parts
        before, there = set(tf.global_variables()), operations()
        with products_in(context.ops.precision):
            found, used = build()
        for loss in tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES):
            context.add_loss(loss)
        what = name.removeprefix("build_")
        try:
            top, after = checked_result(where, found, what, shape, state_parts)
        except UserError as error:
            raise UserError(f"{error}{hint_for_words(inputs_TB, context)}") from error
        created = {variable.op.name for variable in set(tf.global_variables()) - before}
        made, results = _made_since(there), [top, *after.values(), *collected(context).added_losses]
        unneeded = _find_unneeded(used, results)
        first_used, first_unneeded = self._first_used.setdefault(name, (set(used), unneeded))
        sometimes = first_used.symmetric_difference(used) - first_unneeded - unneeded
        reserved = {f"state/{part}" for part in state_parts}
        if name == "build_outputs":
            reserved |= self._network.output_layer.variable_names
        check_variables(where, used, created, reserved, sometimes)
        _omit_weights(created & unneeded, unneeded, used)
        if context.training:
            check_training(where, context)
            collected(context).updates += find_updates(where, made, used, context)
            results += (update.change for update in collected(context).updates)
            self._find_irreproducible(where, made, results)
            updated = {update.variable.op.name for update in collected(context).updates}
            self._lost = find_lost_assignments(where, made, used, updated)
        check_operations(where, made, results)
        self._warn_of_lost_assignment(used.keys() - unneeded)
        return top, after

    def start_update(
        self, global_step: tf.Variable, replaced: Mapping[str, Sequence[str]]
    ) -> UserUpdate | None:
        network = self._network
        takes_part = network.defines("build_optimizer") or network.defines("transform_gradients")
        # The optimizer calls the constraints of variables.
        if not takes_part and not any(v.constraint for v in tf.trainable_variables()):
            return None
        there, where = operations(), f"{self._path}: the update"

        def check(train_op: tf.Operation, num_ranks: int) -> None:
            made = _made_since(there)
            # The gradients are summed over the ranks, but each rank computes the update itself.
            if num_ranks > 1 and (reason := why_irreproducible(where, made, [train_op])):
                raise UserError(f"{reason}; otherwise, the weights of the ranks would diverge")
            self._find_irreproducible(where, made, [train_op])

        return UserUpdate(network, global_step, replaced, check)

    def _warn_of_lost_assignment(self, needed: set[str]) -> None:
        """Warn once of a lost assignment to a variable that results need, even in evaluation."""
        if found := sorted(needed & self._lost.keys()):
            logger.warning(self._lost[found[0]])
            self._lost = {}

    def _find_irreproducible(
        self, where: str, made: Nodes, results: Sequence[tf.Tensor | tf.Operation]
    ) -> None:
        """Store why results of the training can differ between runs, and warn."""
        reason = why_irreproducible(where, made, results)
        if reason and not self.why_irreproducible:  # several calls have the same reason
            self.why_irreproducible = reason
            logger.warning(reason)


def _made_since(there: Nodes) -> Nodes:
    return {name: node for name, node in operations().items() if name not in there}


def _with_line(where: str, operation: str) -> str:
    """Add the line of the user's file that created an operation, if the line is known."""
    try:
        frames = tf.get_default_graph().get_operation_by_name(operation).traceback
    except KeyError:  # an operation of a loop or a condition
        return where
    path, _, function = where.rpartition(": ")
    return f"{place(path, frames)}: {function}"


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
    sometimes: set[str],
) -> None:
    """Check that all uses of a network use the same variables, from tf.get_variable.

    `sometimes` contains the variables that only some uses need.
    """
    for name in sorted(created - used.keys()):
        raise UserError(
            f"{_with_line(where, name)} creates {name} again at each call: use tf.get_variable,"
            " which creates a variable only once"
        )
    for name in sorted(used.keys() & reserved):
        is_state = name.startswith("state/")
        owner = "the recurrent state in a checkpoint" if is_state else "the output layer"
        raise UserError(
            f"{_with_line(where, name)} has the variable {name}, a name of {owner}: rename it"
        )
    for name in sorted(sometimes):
        raise UserError(
            f"{where} uses the variable {name} in some calls only (training, evaluation or single"
            " words): all calls must use the same variables (create the variables of a tf.function"
            " at the top of the file in the network function)"
        )


def _find_unneeded(used: Mapping[str, tf.Variable], results: Sequence[tf.Tensor]) -> set[str]:
    """Return the untrained variables that no result needs, such as a learning rate."""
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    needed = operations_behind(*results, *updates, control_inputs=True)
    return {
        name
        for name, variable in used.items()
        if not variable.trainable and variable.handle.op not in needed
    }


def _omit_weights(omitted: set[str], unneeded: set[str], used: Mapping[str, tf.Variable]) -> None:
    """Omit variables from the weights in checkpoints, until another use needs them."""
    weights = tf.get_collection_ref(tf.GraphKeys.MODEL_VARIABLES)
    there = {variable.op.name for variable in weights}
    kept = [variable for variable in weights if variable.op.name not in omitted]
    weights[:] = kept + [v for name, v in used.items() if name not in there | unneeded]


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
                f"{_with_line(where, op.name)} adds {op.name} to UPDATE_OPS, which updates {name}:"
                " an update must be the only assign, assign_add or assign_sub of an untrained"
                " float32 variable"
            )
        change = _CHANGES[op.type](variable, op.inputs[1]) * context.share_of_batch
        found[name] = VariableUpdate(variable, change)
    update_ops.clear()  # the collection belongs to the graph, which may contain further uses
    return list(found.values())


def check_operations(where: str, made: Nodes, results: Sequence[tf.Tensor]) -> None:
    """Reject assignments that would be executed, and placeholders, in any use of the network."""
    _check_global_step(where, made)
    # Inside a loop, the inputs of the loop are placeholders too.
    in_loop = tf.get_default_graph().building_function
    executed = {op.name for op in operations_behind(*results, control_inputs=True)}
    here = {op.name for op in tf.get_default_graph().get_operations()}
    for name, node in made.items():
        # Each evaluation would assign too, and each rank separately. Functions of loops and
        # conditions are not operations of the graph.
        is_executed = name in executed or name not in here
        if _ASSIGNS.fullmatch(node.op) and is_executed:
            raise UserError(
                f"{_with_line(where, name)} assigns to a variable ({name}): use the state to carry"
                " values from window to window, or add the assignment to the collection UPDATE_OPS"
                " and let nothing depend on it"
            )
        if _READS_INPUTS.fullmatch(node.op) and is_executed:
            raise UserError(
                f"{_with_line(where, name)} reads a queue or a tf.data iterator ({name}): use the"
                " words that the function receives"
            )
        if node.op == "Placeholder" and is_executed and not in_loop:
            raise UserError(
                f"{_with_line(where, name)} uses the placeholder {name}, which receives no value:"
                " use context.training or a field of context.config, or pass a value to tf1.fed"
            )


def find_lost_assignments(
    where: str, made: Nodes, used: Mapping[str, tf.Variable], updated: set[str]
) -> dict[str, str]:
    """Return warnings about assignments that only a session of the program would execute.

    The keys are the names of the variables. `updated` contains the variables that the trainer
    updates.
    """
    names = {v.handle.op: name for name, v in used.items() if name not in updated}
    # tf.train.init_from_checkpoint replaces the first initializer of a variable.
    initializers = {v.initializer.name for v in used.values()} | {f"{name}/Assign" for name in used}
    new, found = made.keys() - initializers, {}
    for op in tf.get_default_graph().get_operations():
        is_assignment = op.name in new and _ASSIGNS.fullmatch(op.type)
        if is_assignment and (name := names.get(op.inputs[0].op)):
            fix = "initializer= or constraint= of tf.get_variable, or the collection UPDATE_OPS"
            if used[name].dtype.is_integer:
                fix = "context.step, or in a TF 1.x program a variable with the name global_step"
            found[name] = (
                f"{_with_line(where, op.name)} assigns to {name}, but nothing executes this"
                f" assignment: use {fix}"
            )
    return found


def check_training(where: str, context: Context) -> None:
    """Reject a network that cannot be trained or that ignores a setting."""
    for name, instead in _COLLECTED.items():
        if tf.get_collection(name):
            raise UserError(f"{where} adds to the collection {name}, which is not used: {instead}")
    check_no_graph_seed(where)
    config, penalty = context.config, context.config.activation_penalty
    if config.num_steps > 1:
        penalty = penalty or config.temporal_activation_penalty
    needs = {
        "penalize": (penalty, "activation_penalty and temporal_activation_penalty need"),
        "kept_state": (config.reset_state != "never", "reset_state needs"),
        "drop_weights": (config.recurrent_keep_prob < 1, "recurrent_keep_prob needs"),
    }
    for method, (is_needed, settings) in needs.items():
        if is_needed and method not in collected(context).called:
            raise UserError(f"{where} does not call context.{method}, which {settings}")


def _check_global_step(where: str, made: Nodes) -> None:
    step, graph = tf.train.get_global_step(), tf.get_default_graph()
    if step is None:
        return
    reads_step = {step.op, tf.convert_to_tensor(step).op}
    for op in graph.get_operations():
        if op.name in made and reads_step.intersection(tensor.op for tensor in op.inputs):
            raise UserError(
                f"{_with_line(where, op.name)} uses the global step, which exists only in training:"
                " use context.step"
            )


def why_irreproducible(where: str, made: Nodes, results: Sequence[tf.Tensor | tf.Operation]) -> str:
    """Return the reason why results can differ between runs, or an empty string."""
    behind = {op.name for op in operations_behind(*results, control_inputs=True)}
    here = {op.name for op in tf.get_default_graph().get_operations()}
    for name, node in made.items():
        if name in here and name not in behind:
            continue  # computes an initial value; loops and conditions have separate graphs
        # Even with a seed, the numbers depend on the number of previous runs of the operation.
        if "seed2" in node.attr and node.op not in _DRAWS_NOTHING:
            instead = "context.dropout for dropout, or tf.random.stateless_* with context.seed()"
            if node.op.endswith("CandidateSampler"):
                instead = "sampled_values=context.sample_candidates(...)"
            return (
                f"{_with_line(where, name)} draws random numbers with {node.op}, which are not"
                f" reproducible: use {instead}"
            )
        if node.op in PYTHON_OPS - {"PyFuncStateless"}:
            return (
                f"{_with_line(where, name)} runs Python code ({node.op}), so results may not be"
                " reproducible: if the code has no state and draws no random numbers, declare it"
                " with stateful=False"
            )
    return ""
