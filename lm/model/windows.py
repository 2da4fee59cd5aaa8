"""Graphs of the network over windows of a fixed size, for training and evaluation.

Shapes: T time steps, B rows, H hidden units, V words, N = T * B tokens.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.data.batches import Rows
from lm.model.context import SeparateReduction, VariableUpdate, collected
from lm.model.network import Network
from lm.model.ops import fastest, implementation

Run = Callable[[Any, dict], Any]  # `session.run`, or a replacement
Result = TypeVar("Result")


class WindowGraph(NamedTuple):
    """The placeholders and results of a window of B rows."""

    inputs_ph: tf.Tensor  # int32 [T, B]
    targets_ph: tf.Tensor  # int32 [T, B]
    first_row_ph: tf.Tensor  # int64 scalar: index of the first row in the global batch
    state_phs: Mapping[str, tf.Tensor]  # the recurrent state before the window, [B, ...]
    state: Mapping[str, tf.Tensor]  # the recurrent state after the window
    loss: tf.Tensor  # float32 scalar to differentiate: nll_sum / batch_size, plus added losses
    nll_sum: tf.Tensor  # float32 scalar: sum over the tokens, in nats
    nll_TB: tf.Tensor  # float32: value of each token, in nats
    separate_reductions: Sequence[SeparateReduction]
    updates: Sequence[VariableUpdate]


def build_window_graph(
    network: Network, rows: Rows, name: str, dropout_step: tf.Tensor | None = None
) -> WindowGraph:
    """Build the network for windows of `rows.count` rows and `num_steps` time steps.

    Several window graphs may share the network. `rows` are the rows of the first window, and later
    windows have the same micro-batches. In training, the global step `dropout_step` (int64) keys
    the dropout masks.
    """
    config = network.config
    ops = fastest(config.precision, rows.micro_batches)
    shape = [config.num_steps, rows.count]
    with tf.variable_scope(name):
        inputs_ph = tf.placeholder(tf.int32, shape, "inputs")
        targets_ph = tf.placeholder(tf.int32, shape, "targets")
        # A constant would be folded into other constants, differently for each value.
        first_row_ph = tf.placeholder(tf.int64, [], "first_row")
        state_phs = {
            part: tf.placeholder(dtype, [rows.count, *sizes], f"state_{part}")
            for part, (sizes, dtype) in network.state_parts.items()
        }
        context = network.context(
            ops=ops,
            num_rows=rows.count,
            first_row=first_row_ph,
            step=dropout_step,
            spans_micro_batches=network.is_built_in,
        )
        loss, nll_TB, state = network.losses(inputs_ph, targets_ph, state_phs, context)
        for added in collected(context).added_losses:
            loss += added
        column_sums = implementation().column_sums
        nll_sum = column_sums(tf.reshape(nll_TB, [-1, 1]), rows.micro_batches)[0]
    return WindowGraph(
        inputs_ph,
        targets_ph,
        first_row_ph,
        state_phs,
        state,
        loss,
        nll_sum,
        nll_TB,
        collected(context).separate_reductions,
        collected(context).updates,
    )


class WindowRunner:
    """Runs a window graph over the local rows, and carries their recurrent state.

    A graph may cover only a part of the rows, such as a micro-batch. The parts are then computed by
    several threads at the same time. Results do not depend on the number of threads, because each
    part is computed by the same operations with the same shapes.

    Attributes:
      state: The recurrent state of the local rows by name, [local rows, ...].
    """

    def __init__(self, graph: WindowGraph, rows: Rows, num_threads: int = 1):
        self.graph, self._rows, self._num_threads = graph, rows, num_threads
        self._rows_of_part = graph.inputs_ph.shape.as_list()[1]
        self._num_parts = rows.count // self._rows_of_part
        self.reset_state()

    def reset_state(self) -> None:
        """Set the recurrent state to zero."""
        self.state = {
            name: np.zeros([self._rows.count, *ph.shape[1:]], ph.dtype.as_numpy_dtype)
            for name, ph in self.graph.state_phs.items()
        }

    def run(
        self,
        run: Run,
        fetches: Any,
        inputs: np.ndarray,
        targets: np.ndarray,
        feed: Mapping[tf.Tensor, Any],
        add: Callable[[Any, Any], Any] | None = None,
    ) -> Any:
        """Run a window of the local rows, int32 [T, local rows], and carry the recurrent state.

        Args:
          run: `session.run` or a replacement; called by several threads at the same time.
          fetches: The results of a part.
          feed: Values of further placeholders, which are the same in all parts.
          add: Adds the results of neighboring parts, as a binary tree. The number of parts must
            be a power of two. Without `add`, the results are returned as a list.
        """
        states: list = [None] * self._num_parts

        def run_part(index: int) -> Any:
            part = slice(index * self._rows_of_part, (index + 1) * self._rows_of_part)
            values = {
                self.graph.inputs_ph: inputs[:, part],
                self.graph.targets_ph: targets[:, part],
                self.graph.first_row_ph: self._rows.first + part.start,
                **{ph: self.state[name][part] for name, ph in self.graph.state_phs.items()},
                **feed,
            }
            states[index], found = run([self.graph.state, fetches], values)
            return found

        if add:
            found = _sum_parts(run_part, self._num_parts, add, self._num_threads)
        else:
            found = _map_parts(run_part, self._num_parts, self._num_threads)
        self.state = {name: np.concatenate([s[name] for s in states]) for name in self.state}
        return found


def _map_parts(run_part: Callable[[int], Result], num_parts: int, num_threads: int) -> list[Result]:
    """Return the results of all parts. Threads take the parts in their order."""
    if min(num_parts, num_threads) == 1:
        return list(map(run_part, range(num_parts)))
    with ThreadPoolExecutor(min(num_parts, num_threads)) as threads:
        return list(threads.map(run_part, range(num_parts)))


def _sum_parts(
    run_part: Callable[[int], Result],
    num_parts: int,
    add: Callable[[Result, Result], Result],
    num_threads: int,
) -> Result:
    """Add up the results of all parts as a binary tree of neighbors.

    Because the parts are taken in their order, only a few partial sums exist at the same time.
    """
    partial: dict[tuple[int, int], Result] = {}  # keys are (level, index) in the tree
    lock = threading.Lock()

    def work(index: int) -> None:
        total, level = run_part(index), 0
        while True:
            with lock:
                neighbor = partial.pop((level, index ^ 1), None)
                if neighbor is None:
                    partial[level, index] = total
                    return
            # Horovod's thread, which continues the tree, treats subnormal numbers as zero.
            with kernels.subnormals_are_zero():
                total = add(neighbor, total) if index % 2 else add(total, neighbor)
            level, index = level + 1, index // 2

    _map_parts(work, num_parts, num_threads)
    (total,) = partial.values()
    return total
