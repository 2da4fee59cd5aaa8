"""The update of the weights: reduce, then clip, then apply."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Callable, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.errors import UserError
from lm.model.ops import COMPILED, fastest
from lm.model.perplexity import MAX_MEAN_NLL


class Update(NamedTuple):
    """The ops of one optimizer step."""

    train_op: tf.Operation
    grad_norm: tf.Tensor  # float32 scalar: norm of the global batch's gradient, before clipping
    is_sound: tf.Tensor  # bool scalar: the loss is one of a model, and the norm is finite
    exchange_seconds: tf.Tensor  # float64 scalar: from the last local gradient to the last sum


class _Adam(tf.train.AdamOptimizer):
    """Adam, algorithm 1 of Kingma & Ba (2015), with the decoupled weight decay of Loshchilov &
    Hutter (2019), algorithm 2, as torch.optim.AdamW has it.
    """

    def __init__(self, config: Config, rate: tf.Tensor):
        super().__init__(rate, config.adam_beta1, config.adam_beta2, config.adam_epsilon)
        self._weight_decay = config.weight_decay

    def _prepare(self):
        super()._prepare()
        # TensorFlow adds its epsilon before the correction of the bias: "epsilon hat" of the paper.
        _, beta2_power = self._get_beta_accumulators()
        self._epsilon_t *= tf.sqrt(1 - beta2_power)

    def _resource_apply_dense(self, grad, var):
        decayed = []
        if self._weight_decay:
            with tf.control_dependencies([grad]):  # by then the weights have been read
                decayed.append(var.assign(var * (1 - self._lr_t * self._weight_decay)))
        with tf.control_dependencies(decayed):
            return super()._resource_apply_dense(grad, var)


# What a step does with its gradients, which are dense and clipped, but for plain sgd.
_UPDATES: dict[str, Callable[[Config, tf.Tensor], tf.train.Optimizer]] = {
    "sgd": lambda config, rate: tf.train.GradientDescentOptimizer(rate),
    # velocity = momentum * velocity + gradient; weights -= rate * velocity: as torch.optim.SGD.
    "momentum": lambda config, rate: tf.train.MomentumOptimizer(rate, config.momentum),
    "adam": _Adam,
}


class _LocalGradients(tf.train.Optimizer):
    """Prepares gradients for their exchange, and keeps them, so that it can be timed.

    Args:
      prepare: Applied to each gradient and its variable.
    """

    def __init__(self, prepare: Callable):
        super().__init__(use_locking=False, name="LocalGradients")
        self._prepare_gradient = prepare

    def compute_gradients(self, *args, **kwargs):
        found = super().compute_gradients(*args, **kwargs)
        self.local_gradients = [(self._prepare_gradient(_used(g, v), v), v) for g, v in found]
        return self.local_gradients


def build_update(
    config: Config,
    loss: tf.Tensor,
    learning_rate: tf.Tensor,
    global_step: tf.Variable,
    comm: Communicator,
    mean_nll: Optional[tf.Tensor] = None,
    skip_unsound: bool = False,
    shares: Sequence[int] = (),
) -> Update:
    """Build the ops that reduce the gradients over the ranks, THEN clip, then apply them.

    Clipping before the reduction would clip each rank's part by a norm of its own, and the run
    would depend on the number of ranks. What each rank computes after the reduction must come
    out the same on all of them, bit for bit, whatever their threads and devices.

    Args:
      config: For the optimizer, `max_grad_norm` and the size of the batch.
      loss: Scalar; this rank's part of the global loss, so that the sum over the ranks is it.
      learning_rate: Scalar.
      global_step: Incremented by one at each update.
      comm: The ranks.
      mean_nll: Scalar; the global batch's, in nats per token, the same on all ranks. None takes
        every loss for sound.
      skip_unsound: Whether an update that is not sound only counts the step. It costs a branch.
      shares: Rows of this rank's shares; see `Rows`. Gradients that are lists of rows, such as the
        embedding's, are added up share by share where they are listed row by row.

    Returns:
      The train op, and what it tells of itself.

    Raises:
      UserError: The loss does not depend on a variable.
    """
    variables = tf.trainable_variables()
    local = _LocalGradients(
        lambda gradient, variable: (
            _add_up(gradient, variable.shape.as_list(), shares)
            if _is_sparse(gradient) and dense_is_smaller(config, variable.shape.as_list()[0])
            else gradient
        )
    )
    summed = [g for g, _ in comm.distribute(local).compute_gradients(loss, variables)]
    exchange_seconds = _seconds_between([gradient for gradient, _ in local.local_gradients], summed)
    gradients = [
        _merge_duplicates(gradient) if _is_sparse(gradient) else gradient for gradient in summed
    ]
    grad_norm = _global_norm([_values(gradient) for gradient in gradients], comm)
    is_sound = tf.is_finite(grad_norm)
    if mean_nll is not None:
        is_sound &= mean_nll <= MAX_MEAN_NLL  # false for NaN
    clip = _clip_factor(grad_norm, config.max_grad_norm)

    def apply() -> tf.Operation:
        rate, prepared = learning_rate, gradients
        if config.optimizer == "sgd" and not config.weight_decay:
            # g * clip * rate = g * (clip * rate): clipping by way of the rate saves a pass over
            # all gradients. Rows of words that the batch has not are left alone.
            rate = learning_rate * clip
        else:
            prepared = [_whole(g, v, clip, config) for g, v in zip(gradients, variables)]
        optimizer = _UPDATES[config.optimizer](config, rate)
        return optimizer.apply_gradients(zip(prepared, variables), global_step)

    if not skip_unsound:
        return Update(apply(), grad_norm, is_sound, exchange_seconds)
    train_op = tf.cond(
        is_sound,
        lambda: _zero_after(apply()),
        lambda: _zero_after(tf.assign_add(global_step, 1)),
    ).op
    return Update(train_op, grad_norm, is_sound, exchange_seconds)


def _clip_factor(grad_norm: tf.Tensor, max_grad_norm: float) -> tf.Tensor:
    """Return what brings the norm down to its maximum: 1 where it is below."""
    if max_grad_norm > float(tf.float32.max):  # no clipping: infinity over infinity would be NaN
        return tf.constant(1.0)
    # A norm of NaN makes the weights NaN: never a silent update.
    return max_grad_norm / tf.maximum(grad_norm, max_grad_norm)


def _whole(gradient, variable: tf.Variable, clip: tf.Tensor, config: Config) -> tf.Tensor:
    """Return the clipped gradient of all rows, also of those that the batch has not: their
    velocity, their means and their weight decay go on, as they do in torch.optim."""
    if _is_sparse(gradient):
        rows = variable.shape[0]
        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
    if config.optimizer == "adam" or not config.weight_decay:
        return gradient * clip
    return gradient * clip + config.weight_decay * variable


def _global_norm(tensors: Sequence[tf.Tensor], comm: Communicator) -> tf.Tensor:
    ops = fastest()
    norm = ops.global_norm(tensors)
    # Ranks that clip by factors one bit apart would part: where it is not the same on all, they
    # take rank 0's.
    return norm if ops is COMPILED else comm.broadcast(norm, "grad_norm")


def _used(gradient, variable: tf.Variable):
    if gradient is None:
        raise UserError(
            f"the loss does not depend on the variable {variable.op.name}: use it, or make it with"
            " trainable=False"
        )
    return gradient


def _is_sparse(gradient) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _values(gradient) -> tf.Tensor:
    return gradient.values if _is_sparse(gradient) else gradient


def _seconds_between(before: list, after: list) -> tf.Tensor:
    """Return the time from when all of some tensors are there until all of others are."""

    def time_of(gradients: list) -> tf.Tensor:
        with tf.control_dependencies([_values(gradient) for gradient in gradients]):
            return tf.timestamp()

    return time_of(after) - time_of(before)


def _zero_after(op: tf.Operation) -> tf.Tensor:
    # The branches of a condition return tensors; an op alone would not be run.
    with tf.control_dependencies([op]):
        return tf.constant(0)


def _add_up(slices: tf.IndexedSlices, shape: Sequence[int], shares: Sequence[int]) -> tf.Tensor:
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
        total = fastest().token_sum(flat, [1] * len(parts))
    return tf.reshape(total, shape)


def _merge_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sum the slices of the same row: un-merged, their norm would depend on how the words of
    the global batch are spread over the ranks.

    On the CPU, also where there is a GPU: there each row is summed by one thread, in the order of
    the slices. A GPU adds atomically, in any order, and the ranks' weights would part.
    """
    with tf.device("cpu:0"):
        rows, position = tf.unique(slices.indices)
        values = tf.math.unsorted_segment_sum(slices.values, position, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def dense_is_smaller(config: Config, rows: int) -> bool:
    """Whether the gradient of a table, such as the embedding, has fewer bytes as a dense tensor.

    Sparse: each rank receives the rows of all tokens of the global batch. Dense: a ring
    allreduce moves every row twice.
    """
    return config.batch_size * config.num_steps >= 2 * rows
