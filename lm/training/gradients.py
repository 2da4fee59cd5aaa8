"""The gradients of the global batch: local gradients, and their sums over the ranks."""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm import logger
from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.errors import UserError
from lm.model.context import SeparateReduction
from lm.model.ops import fastest
from lm.model.variables import operations_behind

# A sparse gradient (IndexedSlices) lists rows of a table, such as the embedding.
Gradient = tf.Tensor | tf.IndexedSlices

_MAX_NAMES = 5  # in a message


class Exchange(NamedTuple):
    """The gradients of the global batch."""

    variables: Sequence[tf.Variable]  # trainable variables that the loss depends on
    gradients: Sequence[Gradient]  # one per variable; sparse gradients list each row once
    seconds: tf.Tensor  # float64 scalar: from the last local gradient to the last sum


class LocalSums(NamedTuple):
    """Tensors that are computed for each part of the local rows, and added up outside the graph.

    Both lists have the same structure. A sparse gradient is a pair, values and indices, because
    TensorFlow does not allow to feed the shape.
    """

    of_part: list[tf.Tensor | tuple[tf.Tensor, tf.Tensor]]
    sum_phs: list[tf.Tensor | tuple[tf.Tensor, tf.Tensor]]

    def add(self, tensor: Gradient) -> Gradient:
        """Add a tensor of a part, and return the placeholder of its sum."""
        if not is_sparse(tensor):
            self.of_part.append(tensor)
            self.sum_phs.append(tf.placeholder(tensor.dtype, tensor.shape))
            return self.sum_phs[-1]
        self.of_part.append((tensor.values, tensor.indices))
        values_ph = tf.placeholder(tensor.dtype, [None, *tensor.values.shape[1:]])
        indices_ph = tf.placeholder(tensor.indices.dtype, [None])
        self.sum_phs.append((values_ph, indices_ph))
        return tf.IndexedSlices(values_ph, indices_ph, tensor.dense_shape)

    def feed(self, sums: list) -> dict[tf.Tensor, np.ndarray]:
        pairs = zip(self.sum_phs, sums)
        return {
            placeholder: value
            for ph, found in pairs
            for placeholder, value in (zip(ph, found) if isinstance(ph, tuple) else [(ph, found)])
        }


def add_sums(first: list, second: list) -> list:
    """Add the values of `LocalSums.of_part` of two parts: sparse gradients are concatenated."""
    return [
        tuple(map(np.concatenate, zip(one, two))) if isinstance(one, tuple) else one + two
        for one, two in zip(first, second)
    ]


class _LocalGradients(tf.train.Optimizer):
    """Prepares the local gradients for the exchange, and keeps them to time the exchange.

    `prepare` is a function of a gradient and its variable; not called without a gradient.
    """

    def __init__(self, prepare: Callable[[Gradient, tf.Variable], Gradient]):
        super().__init__(use_locking=False, name="LocalGradients")
        self._prepare_gradient = prepare

    def compute_gradients(self, *args, **kwargs):
        self.local_gradients = [
            (gradient if gradient is None else self._prepare_gradient(gradient, variable), variable)
            for gradient, variable in super().compute_gradients(*args, **kwargs)
        ]
        return self.local_gradients


def freeze(trainable: str) -> None:
    """Freeze the weights of the current graph whose names do not match a regular expression."""
    weights = tf.get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
    trained = [v for v in weights if re.search(trainable, v.op.name)]
    if not trained:
        names = ", ".join(v.op.name for v in weights[:_MAX_NAMES])
        raise UserError(f"--trainable {trainable} matches none of the weights {names}, ...")
    weights[:] = trained


def _reaches(reduction: SeparateReduction, variables: Sequence[tf.Variable]) -> bool:
    """Return whether the weights of a reduction depend on variables."""
    behind = operations_behind(reduction.weights)
    return any(variable.handle.op in behind for variable in variables)


def exchange_gradients(
    config: Config,
    loss: tf.Tensor,
    comm: Communicator,
    micro_batches: Sequence[int] = (),
    separate_reductions: Sequence[SeparateReduction] = (),
    local_sums: LocalSums | None = None,
) -> Exchange:
    """Sum the gradients of all trainable variables over the ranks.

    Args:
      loss: This rank's part of the global loss, a scalar. The sum over the ranks is the loss.
      micro_batches: Rows of each micro-batch of this rank; see `Rows`. A sparse gradient with one
        entry per token is summed micro-batch by micro-batch.
      separate_reductions: Uses of weights whose gradients are summed over the ranks first, and
        then flow into the weights.
      local_sums: Receives the local gradients if they are added up outside the graph.
    """

    def prepare(gradient: Gradient, variable: tf.Variable) -> Gradient:
        shape = variable.shape.as_list()
        if is_sparse(gradient) and dense_is_smaller(config, shape[0]):
            gradient = _sum_rows(gradient, shape, micro_batches)
        return local_sums.add(gradient) if local_sums else gradient

    variables = tf.trainable_variables()
    separate_reductions = [r for r in separate_reductions if _reaches(r, variables)]
    local = _LocalGradients(prepare)
    sources = [*variables, *(reduction.used for reduction in separate_reductions)]
    summed = [g for g, _ in comm.distribute(local).compute_gradients(loss, sources)]
    seconds = _seconds_between([gradient for gradient, _ in local.local_gradients], summed)
    gradients = [_merge_duplicates(gradient) for gradient in summed[: len(variables)]]
    used = zip(separate_reductions, summed[len(variables) :])
    reached = [(reduction.weights, g) for reduction, g in used if g is not None]
    if reached:
        weights, upstream = map(list, zip(*reached))
        # Each row occurs once before rows are summed, so the order of the sum is fixed.
        separate = [
            dense(_merge_duplicates(gradient), variable)
            for gradient, variable in zip(tf.gradients(weights, variables, upstream), variables)
        ]
        gradients = list(map(_add, gradients, separate))
    unused = [v.op.name for g, v in zip(gradients, variables) if g is None]
    if unused:
        logger.warning("the loss does not depend on %s, which keeps its value", ", ".join(unused))
    kept = [(g, v) for g, v in zip(gradients, variables) if g is not None]
    return Exchange([v for _, v in kept], [g for g, _ in kept], seconds)


def _add(gradient: Gradient | None, separate: tf.Tensor | None) -> Gradient | None:
    """Add the two parts of a variable's gradient, which are already summed over the ranks."""
    if gradient is None or separate is None:
        return separate if gradient is None else gradient
    if is_sparse(gradient):  # lists each row once, so the order does not matter
        return tf.tensor_scatter_nd_add(separate, gradient.indices[:, None], gradient.values)
    return gradient + separate


def is_sparse(gradient: Gradient | None) -> bool:
    """Return whether a gradient is a list of rows."""
    return isinstance(gradient, tf.IndexedSlices)


def values_of(gradient: Gradient) -> tf.Tensor:
    return gradient.values if is_sparse(gradient) else gradient


def dense(gradient: Gradient | None, variable: tf.Variable) -> tf.Tensor | None:
    """Return the gradient of a whole variable; a sparse gradient must list each row once."""
    if not is_sparse(gradient):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])


def _seconds_between(before: Sequence[Gradient | None], after: Sequence[Gradient | None]):
    """Return the time from the last of some gradients to the last of other gradients."""

    def time_of(values: Sequence[tf.Tensor]) -> tf.Tensor:
        with tf.control_dependencies(values):
            return tf.timestamp()

    start = time_of([values_of(g) for g in before if g is not None])
    # The end depends on the start: a single process, without an exchange, might read the end first.
    return time_of([*(values_of(g) for g in after if g is not None), start]) - start


def _sum_rows(
    slices: tf.IndexedSlices, shape: Sequence[int], micro_batches: Sequence[int]
) -> tf.Tensor:
    """Return a sparse gradient as a dense gradient, summed micro-batch by micro-batch as a tree."""
    num_slices = slices.values.shape.as_list()[0]
    rows = sum(micro_batches)
    with tf.device("cpu:0"):  # see _merge_duplicates
        if not rows or not num_slices or num_slices % rows:  # the rows are not one per token
            return tf.math.unsorted_segment_sum(slices.values, slices.indices, shape[0])
        sizes = [num_slices // rows * size for size in micro_batches]
        parts = [
            tf.math.unsorted_segment_sum(values, indices, shape[0])
            for values, indices in zip(
                tf.split(slices.values, sizes), tf.split(slices.indices, sizes)
            )
        ]
        # TensorFlow's graph optimizer would change the summation order of `+`.
        flat = tf.reshape(tf.stack(parts), [len(parts), math.prod(shape)])
        total = fastest().column_sums(flat, [1] * len(parts))
    return tf.reshape(total, shape)


def _merge_duplicates(gradient: Gradient | None) -> Gradient | None:
    """Sum the entries of a sparse gradient that belong to the same row.

    Otherwise, the norm would depend on how the words are distributed over the ranks. The CPU sums
    each row in the order of the entries. A GPU would sum them in any order, and the weights of the
    ranks would diverge.
    """
    if not is_sparse(gradient):
        return gradient
    with tf.device("cpu:0"):
        rows, position = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, position, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def dense_is_smaller(config: Config, rows: int) -> bool:
    """Return whether a table's gradient has fewer bytes as a dense tensor than as a list of rows.

    In an exchange of lists, each rank receives one row per token of the global batch. An allreduce
    of the dense tensor moves each row of the table twice.
    """
    return config.batch_size * config.num_steps >= 2 * rows
