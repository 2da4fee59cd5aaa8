"""The gradients of a step: each rank's, their exchange, and what becomes of them after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Callable, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.errors import UserError

Gradient = Union[tf.Tensor, tf.IndexedSlices]


class Exchange(NamedTuple):
    """The gradients of the global batch."""

    gradients: Sequence[Gradient]  # of each variable; of a list of rows, each row is there once
    seconds: tf.Tensor  # float64 scalar: from the last local gradient to the last sum


class _LocalGradients(tf.train.Optimizer):
    """Prepares gradients for their exchange, and keeps them, so that it can be timed.

    Args:
      prepare: Applied to each gradient that there is, and its variable.
    """

    def __init__(self, prepare: Callable):
        super().__init__(use_locking=False, name="LocalGradients")
        self._prepare_gradient = prepare

    def compute_gradients(self, *args, **kwargs):
        self.local_gradients = [
            (gradient if gradient is None else self._prepare_gradient(gradient, variable), variable)
            for gradient, variable in super().compute_gradients(*args, **kwargs)
        ]
        return self.local_gradients


def exchange_gradients(
    config: Config,
    loss: tf.Tensor,
    comm: Communicator,
    column_sums: Callable,
    shares: Sequence[int],
    cuts: Sequence[tuple[tf.Tensor, tf.Tensor]],
) -> Exchange:
    """Sum the gradients of all trained variables over the ranks.

    Args:
      config: For the size of the batch.
      loss: Scalar; this rank's part of the global loss, so that the sum over the ranks is it.
      comm: The ranks.
      column_sums: Of `lm.model.ops`.
      shares: Rows of this rank's shares; see `Rows`. Gradients that are lists of rows, such as the
        embedding's, are added up share by share where they are listed row by row.
      cuts: Tensors made of variables alone, each with the one that the loss depends on in its
        place: its gradient is exchanged, and flows on into the former after that.

    Returns:
      The gradients, summed, and how long that took.

    Raises:
      UserError: The loss does not depend on a variable.
    """
    variables = tf.trainable_variables()
    local = _LocalGradients(
        lambda gradient, variable: (
            _add_up(gradient, variable.shape.as_list(), shares, column_sums)
            if is_sparse(gradient) and dense_is_smaller(config, variable.shape.as_list()[0])
            else gradient
        )
    )
    sources = [*variables, *(used for _, used in cuts)]
    summed = [g for g, _ in comm.distribute(local).compute_gradients(loss, sources)]
    seconds = _seconds_between([gradient for gradient, _ in local.local_gradients], summed)
    direct, of_cuts = summed[: len(variables)], summed[len(variables) :]
    gradients = list(map(_merge_duplicates, direct))
    reached = [(made, g) for (made, _), g in zip(cuts, of_cuts) if g is not None]
    if reached:
        made, of_made = map(list, zip(*reached))
        by_cuts = [  # with the rows of a table that are one summed first, in one order
            dense(_merge_duplicates(gradient), variable)
            for gradient, variable in zip(tf.gradients(made, variables, of_made), variables)
        ]
        gradients = map(_total, gradients, by_cuts)
    return Exchange(list(map(_used, gradients, variables)), seconds)


def _total(direct: Optional[Gradient], by_cuts: Optional[tf.Tensor]) -> Optional[Gradient]:
    """Add the two parts of a variable's gradient, each the sum over the ranks."""
    if direct is None or by_cuts is None:
        return by_cuts if direct is None else direct
    if is_sparse(direct):  # with each row once, so that no order matters
        return tf.tensor_scatter_nd_add(by_cuts, direct.indices[:, None], direct.values)
    return direct + by_cuts


def _used(gradient: Optional[Gradient], variable: tf.Variable) -> Gradient:
    if gradient is None:
        raise UserError(
            f"the loss does not depend on the variable {variable.op.name}: use it, or make it with"
            " trainable=False"
        )
    return gradient


def is_sparse(gradient: Optional[Gradient]) -> bool:
    """Whether a gradient is a list of rows."""
    return isinstance(gradient, tf.IndexedSlices)


def values_of(gradient: Gradient) -> tf.Tensor:
    """Return a gradient's numbers."""
    return gradient.values if is_sparse(gradient) else gradient


def dense(gradient: Optional[Gradient], variable: tf.Variable) -> Optional[tf.Tensor]:
    """Return a variable's gradient with all its rows, of a list with each row once."""
    if not is_sparse(gradient):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])


def _seconds_between(before: list, after: list) -> tf.Tensor:
    """Return the time from when all of some tensors are there until all of others are."""

    def time_of(gradients: list) -> tf.Tensor:
        with tf.control_dependencies([values_of(g) for g in gradients if g is not None]):
            return tf.timestamp()

    start = time_of(before)
    # One process exchanges nothing, and would read its two clocks in any order: below zero.
    return time_of([*after, start]) - start


def _add_up(
    slices: tf.IndexedSlices, shape: Sequence[int], shares: Sequence[int], column_sums: Callable
) -> tf.Tensor:
    """Make a dense gradient of one that is listed row by row, share by share, as a tree."""
    listed = slices.values.shape.as_list()[0]
    with tf.device("cpu:0"):  # see _merge_duplicates
        if not shares or not listed or listed % sum(shares):  # of another list, in its own order
            return tf.math.unsorted_segment_sum(slices.values, slices.indices, shape[0])
        sizes = [listed // sum(shares) * share for share in shares]
        parts = [
            tf.math.unsorted_segment_sum(values, indices, shape[0])
            for values, indices in zip(
                tf.split(slices.values, sizes), tf.split(slices.indices, sizes)
            )
        ]
        # Not with +: TensorFlow's optimizer makes one sum of a tree, in another order.
        flat = tf.reshape(tf.stack(parts), [len(parts), math.prod(shape)])
        total = column_sums(flat, [1] * len(parts))
    return tf.reshape(total, shape)


def _merge_duplicates(gradient: Optional[Gradient]) -> Optional[Gradient]:
    """Sum the slices of the same row of a list: un-merged, their norm would depend on how the words
    of the global batch are spread over the ranks.

    On the CPU, also where there is a GPU: there each row is summed by one thread, in the order of
    the slices. A GPU adds atomically, in any order, and the ranks' weights would part.
    """
    if not is_sparse(gradient):
        return gradient
    with tf.device("cpu:0"):
        rows, position = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, position, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def dense_is_smaller(config: Config, rows: int) -> bool:
    """Whether the gradient of a table, such as the embedding, has fewer bytes as a dense tensor.

    Sparse: each rank receives the rows of all tokens of the global batch. Dense: an allreduce
    moves every row twice.
    """
    return config.batch_size * config.num_steps >= 2 * rows
