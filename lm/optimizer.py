"""SGD: the learning-rate schedule, and reduce -> clip -> apply."""

from __future__ import annotations

import math
from typing import Callable, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from lm.config import Config

Distribute = Callable[[tf.train.Optimizer, bool], tf.train.Optimizer]


def learning_rate_at(config: Config, step: int, steps_per_epoch: int, num_ranks: int = 1) -> float:
    """Return the learning rate of a global step.

    learning_rate * lr_decay^max(epoch - lr_decay_start_epoch + 1, 0), epochs counted from 1;
    raised linearly from 0 over the first `warmup_steps`.

    Args:
      config: The schedule.
      step: Global step, from 0.
      steps_per_epoch: Steps of an epoch.
      num_ranks: Number of ranks, for `scale_lr_by_worker`.
    """
    epoch = step // steps_per_epoch + 1
    decay = config.lr_decay ** max(epoch - config.lr_decay_start_epoch + 1, 0)
    scale = {"none": 1.0, "sqrt": math.sqrt(num_ranks), "linear": float(num_ranks)}
    warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * scale[config.scale_lr_by_worker] * decay * warmup


class Update(NamedTuple):
    """The ops of one optimizer step."""

    train_op: tf.Operation
    grad_norm: tf.Tensor  # float32 scalar: norm of the global batch's gradient, before clipping
    exchange_seconds: tf.Tensor  # float64 scalar: from the last local gradient to the last sum


class _TimedSGD(tf.train.GradientDescentOptimizer):
    """SGD that keeps its own gradients, so that their exchange can be timed."""

    def compute_gradients(self, *args, **kwargs):
        self.local_gradients = super().compute_gradients(*args, **kwargs)
        return self.local_gradients


def build_update(
    config: Config,
    loss: tf.Tensor,
    learning_rate: tf.Tensor,
    global_step: tf.Variable,
    vocab_size: int,
    distribute: Distribute,
    skip_unless_finite: Optional[tf.Tensor] = None,
) -> Update:
    """Build the ops that reduce the gradients over the ranks, THEN clip, then apply them.

    Clipping before the reduction would clip each rank's part by a norm of its own, and the run
    would depend on the number of ranks.

    Args:
      config: For `max_grad_norm` and the sizes.
      loss: Scalar; this rank's part of the global loss, so that the sum over the ranks is it.
      learning_rate: Scalar.
      global_step: Incremented by one at each update.
      vocab_size: Rows of the embedding.
      distribute: `(optimizer, sparse_as_dense) -> optimizer`, whose `compute_gradients`
        returns gradients summed over the ranks.
      skip_unless_finite: A scalar that is the same on all ranks. If given, an update for which
        it or the gradient's norm is not finite only counts the step. It costs a branch.

    Returns:
      The train op, the gradient's norm, and the time that the exchange takes.
    """
    variables = tf.trainable_variables()
    # g * clip * rate = g * (clip * rate): clipping by way of the rate saves a pass over all
    # gradients. The optimizer asks for its rate when the update is built, after the norm.
    rate = []
    local = _TimedSGD(lambda: rate[0])
    optimizer = distribute(local, dense_is_smaller(config, vocab_size))
    summed = [gradient for gradient, _ in optimizer.compute_gradients(loss, variables)]
    exchange_seconds = _seconds_between([gradient for gradient, _ in local.local_gradients], summed)
    gradients = [
        _merge_duplicates(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
        for gradient in summed
    ]
    grad_norm = tf.linalg.global_norm(gradients)
    # Written so that a norm of NaN or infinity makes the weights NaN: never a silent update.
    rate.append(learning_rate * config.max_grad_norm / tf.maximum(grad_norm, config.max_grad_norm))

    def apply() -> tf.Operation:
        return optimizer.apply_gradients(zip(gradients, variables), global_step)

    if skip_unless_finite is None:
        return Update(apply(), grad_norm, exchange_seconds)
    train_op = tf.cond(
        tf.is_finite(skip_unless_finite + grad_norm),
        lambda: _zero_after(apply()),
        lambda: _zero_after(tf.assign_add(global_step, 1)),
    ).op
    return Update(train_op, grad_norm, exchange_seconds)


def _seconds_between(before: list, after: list) -> tf.Tensor:
    """Return the time from when all of some tensors are there until all of others are."""

    def time_of(gradients: list) -> tf.Tensor:
        parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        with tf.control_dependencies(parts):
            return tf.timestamp()

    return time_of(after) - time_of(before)


def _zero_after(op: tf.Operation) -> tf.Tensor:
    # The branches of a condition return tensors; an op alone would not be run.
    with tf.control_dependencies([op]):
        return tf.constant(0)


def _merge_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sum the slices of the same row: un-merged, their norm would depend on how the words of
    the global batch are spread over the ranks."""
    rows, position = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, position, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def dense_is_smaller(config: Config, vocab_size: int) -> bool:
    """Whether the embedding's gradient has fewer bytes to exchange as a dense tensor.

    Sparse: each rank receives the rows of all tokens of the global batch. Dense: a ring
    allreduce moves every row twice.
    """
    return config.batch_size * config.num_steps >= 2 * vocab_size
