"""Graphs of the network over windows of a fixed size, for training and evaluation.

Shapes: T time steps, B rows, H hidden units, V words, N = T * B tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.data.batches import EvalBatches, Rows, eval_rows_of_rank
from lm.model.context import Context, SeparateReduction
from lm.model.network import Network, State
from lm.model.ops import fastest
from lm.perplexity import NllSum

logger = logging.getLogger("lm")

_UNITS_PER_NAT = 2.0**40


class WindowGraph(NamedTuple):
    """The placeholders, results and state operations of a window."""

    inputs_ph: tf.Tensor  # int32 [T, B]
    targets_ph: tf.Tensor  # int32 [T, B]
    loss: tf.Tensor  # float32 scalar to differentiate: nll_sum / batch_size, plus penalties
    nll_sum: tf.Tensor  # float32 scalar: sum over the tokens, in nats
    nll_N: tf.Tensor  # float32: value of each token, in nats
    carry_state_op: tf.Operation  # carries the recurrent state to the next window
    reset_state_op: tf.Operation  # sets the recurrent state to zero
    separate_reductions: Sequence[SeparateReduction]
    state: Mapping[str, tf.Variable]  # the recurrent state


def build_window_graph(
    network: Network, rows: Rows, name: str, dropout_step: tf.Tensor | None = None
) -> WindowGraph:
    """Build the network for windows of `rows.count` rows and `num_steps` time steps.

    The recurrent state is stored in local variables, because each rank has different rows: a
    broadcast of the global variables must not change the state.

    Args:
      network: A network of the current graph. Several window graphs may share it.
      rows: The local rows of the global batch.
      name: Scope of the operations and the local variables.
      dropout_step: The global step (int64) in training, which keys the dropout masks. Otherwise,
        None.
    """
    config = network.config
    ops = fastest(config.precision, rows.micro_batches)
    context = Context(config, network.vocab_size, ops, rows, dropout_step)
    with tf.variable_scope(name):
        shape = [config.num_steps, rows.count]
        inputs_ph = tf.placeholder(tf.int32, shape, "inputs")
        targets_ph = tf.placeholder(tf.int32, shape, "targets")
        before = _build_state(network.state_shapes, rows.count)
        # Read the state once, so that a second read in the network cannot see the new state that
        # `carry_state_op` writes.
        state = {part: tf.convert_to_tensor(variable) for part, variable in before.items()}
        outputs_or_logits, after = network.build(inputs_ph, state, context)
        # Divide by the GLOBAL batch size: the losses of all ranks then add up to the loss, even if
        # ranks have different numbers of rows.
        scale_N = tf.fill([math.prod(shape)], 1 / config.batch_size)
        targets_N = tf.reshape(targets_ph, [-1])
        loss, nll_N = network.cross_entropy(outputs_or_logits, targets_N, scale_N, context)
        for penalty in context.penalties:
            loss += penalty
        nll_sum = ops.column_sums(nll_N[:, None], rows.micro_batches)[0]
        # Overwrite the state only after everything that reads it has run.
        with tf.control_dependencies([nll_sum, *state.values()]):
            carry_state_op = _assign(before, after)
        reset_state_op = _assign(before, {name: tf.zeros_like(s) for name, s in before.items()})
    state_ops = carry_state_op, reset_state_op
    reductions = context.separate_reductions
    return WindowGraph(inputs_ph, targets_ph, loss, nll_sum, nll_N, *state_ops, reductions, before)


def _build_state(shapes: Mapping[str, Sequence[int]], rows: int) -> Mapping[str, tf.Variable]:
    return {
        name: tf.get_variable(
            f"state_{name}",
            [rows, *shape],
            initializer=tf.zeros_initializer(),
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
            trainable=False,
            use_resource=True,
        )
        for name, shape in shapes.items()
    }


def _assign(variables: Mapping[str, tf.Variable], values: State) -> tf.Operation:
    return tf.group(*[variable.assign(values[name]).op for name, variable in variables.items()])


class Evaluator:
    """The evaluation graph of a network for the local rows.

    If `shared`, the rows are distributed over all ranks. Otherwise, rank 0 evaluates all rows.
    """

    def __init__(self, network: Network, eos_id: int, rank: int, size: int, shared: bool):
        self._config, self._eos_id = network.config, eos_id
        self._rows = eval_rows_of_rank(self._config.eval_batch_size, rank, size, shared)
        # A rank without rows builds the graph too, but never runs it. Some networks reject one row.
        built = self._rows if self._rows.count else Rows(0, self._config.eval_batch_size)
        self._graph = build_window_graph(network, built, "eval")

    def run(
        self,
        session: tf.Session,
        name: str,
        ids: np.ndarray,
        gather: Callable[[Any], list],
        poll: Callable[[], None] = lambda: None,
    ) -> NllSum:
        """Evaluate int32 token IDs, and return the sum over all ranks.

        Ranks without rows wait in `gather`, which returns the values of all ranks. `poll` is called
        after each window. `name` is the name of the text in the log.
        """
        logger.info("evaluating %s: %s tokens", name, f"{len(ids):,}")
        own, config = (0, 0), self._config
        if self._rows.count:
            sizes = config.eval_batch_size, config.num_steps
            batches = EvalBatches(ids, *sizes, self._eos_id, self._rows)
            own = run_evaluation(session, self._graph, batches, poll)
        units, tokens = map(sum, zip(*gather(own)))
        return NllSum(units / _UNITS_PER_NAT, tokens)


def run_evaluation(
    session: tf.Session, graph: WindowGraph, batches: EvalBatches, poll: Callable[[], None]
) -> tuple[int, int]:
    """Run an evaluation graph over windows, starting with an empty recurrent state.

    Returns:
      The summed negative log-likelihood in units of 2^-40 nats, and the number of tokens. The sum
      of integers is the same in any order, so it does not depend on the distribution of the rows.
    """
    session.run(graph.reset_state_op)
    units = tokens = 0
    for index in range(batches.num_windows):
        inputs, targets, mask = batches.window(index)
        feed = {graph.inputs_ph: inputs, graph.targets_ph: targets}
        nll_N, _ = session.run([graph.nll_N, graph.carry_state_op], feed)
        counted = nll_N[mask.ravel()].astype(np.float64)
        # A value that is not finite becomes so large that the perplexity is not finite either.
        counted = np.nan_to_num(counted, nan=_UNITS_PER_NAT, posinf=_UNITS_PER_NAT)
        units += sum(map(int, np.rint(counted * _UNITS_PER_NAT)))
        tokens += len(counted)
        poll()
    return units, tokens
