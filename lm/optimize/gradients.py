"""The gradients of the global batch: local gradients, and their sums over the ranks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from lm import logger
from lm.distributed.communicator import Communicator
from lm.model.context import SeparateReduction
from lm.model.variables import operations_behind
from lm.optimize.local_sums import LocalSums
from lm.optimize.sparse import (
    Gradient,
    dense,
    dense_is_smaller,
    is_sparse,
    merge_duplicates,
    sum_rows,
    values_of,
)


class Exchange(NamedTuple):
    """The gradients of the global batch."""

    variables: Sequence[tf.Variable]  # trainable variables that the loss depends on
    gradients: Sequence[Gradient]  # one per variable; sparse gradients list each row once
    seconds: tf.Tensor  # float64 scalar: from the last local gradient to the last sum


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


def _reaches(reduction: SeparateReduction, variables: Sequence[tf.Variable]) -> bool:
    """Return whether the weights of a reduction depend on variables."""
    behind = operations_behind(reduction.weights)
    return any(variable.handle.op in behind for variable in variables)


def exchange_gradients(
    loss: tf.Tensor,
    num_tokens: int,
    comm: Communicator,
    micro_batches: Sequence[int] = (),
    separate_reductions: Sequence[SeparateReduction] = (),
    local_sums: LocalSums | None = None,
) -> Exchange:
    """Sum the gradients of all trainable variables over the ranks.

    Args:
      loss: This rank's part of the global loss, a scalar. The sum over the ranks is the loss.
      num_tokens: The number of tokens in the global batch.
      micro_batches: Rows of each micro-batch of this rank; see `Rows`. A sparse gradient with one
        entry per token is summed micro-batch by micro-batch.
      separate_reductions: Uses of weights whose gradients are summed over the ranks first, and
        then flow into the weights.
      local_sums: Adds up the local gradients if the local rows are divided into several windows.
    """

    def prepare(gradient: Gradient, variable: tf.Variable) -> Gradient:
        shape = variable.shape.as_list()
        if is_sparse(gradient) and dense_is_smaller(shape[0], num_tokens):
            gradient = sum_rows(gradient, shape, micro_batches)
        return local_sums.sum(gradient) if local_sums else gradient

    variables = tf.trainable_variables()
    separate_reductions = [r for r in separate_reductions if _reaches(r, variables)]
    local = _LocalGradients(prepare)
    sources = [*variables, *(reduction.used for reduction in separate_reductions)]
    summed = [g for g, _ in comm.distribute(local).compute_gradients(loss, sources)]
    seconds = _seconds_between([gradient for gradient, _ in local.local_gradients], summed)
    of_variables, of_uses = summed[: len(variables)], summed[len(variables) :]
    weights = [r.weights for r, g in zip(separate_reductions, of_uses) if g is not None]
    upstream = [gradient for gradient in of_uses if gradient is not None]
    separate = tf.gradients(weights, variables, upstream) if weights else [None] * len(variables)
    # Each row occurs once before rows are summed, so the order of the sum is fixed.
    gradients = [
        _add(merge_duplicates(gradient), dense(merge_duplicates(through_uses), variable))
        for gradient, through_uses, variable in zip(of_variables, separate, variables)
    ]
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


def _seconds_between(before: Sequence[Gradient | None], after: Sequence[Gradient | None]):
    """Return the time from the last of some gradients to the last of other gradients.

    Return 0 if the user enabled TensorFlow's op determinism on a GPU, because it rejects the clock.
    """
    if is_op_determinism_enabled():
        return tf.constant(0, tf.float64)

    def time_of(values: Sequence[tf.Tensor]) -> tf.Tensor:
        with tf.control_dependencies(values):
            return tf.timestamp()

    start = time_of([values_of(g) for g in before if g is not None])
    # The end depends on the start: a single process, without an exchange, might read the end first.
    return time_of([*(values_of(g) for g in after if g is not None), start]) - start
