"""The update of the weights: reduce, then clip, then apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, NamedTuple

import tensorflow.compat.v1 as tf

from lm import kernels
from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.model.context import SeparateReduction
from lm.model.ops import fastest
from lm.training.gradients import Gradient, dense, exchange_gradients, values_of


class Update(NamedTuple):
    """The ops of one optimizer step."""

    train_op: tf.Operation
    grad_norm: tf.Tensor  # float32 scalar: norm of the global batch's gradient, before clipping
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


def build_update(
    config: Config,
    loss: tf.Tensor,
    learning_rate: tf.Tensor,
    global_step: tf.Variable,
    comm: Communicator,
    *,
    shares: Sequence[int],
    cuts: Sequence[SeparateReduction],
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
      shares: Rows of this rank's shares; see `exchange_gradients`.
      cuts: Uses of weights whose gradients are exchanged by themselves; see `Context.cut`.

    Returns:
      The train op, and what it tells of itself.

    Raises:
      UserError: The loss does not depend on a variable.
    """
    exchange = exchange_gradients(config, loss, comm, fastest().column_sums, shares, cuts)
    variables, gradients = tf.trainable_variables(), exchange.gradients
    grad_norm = _global_norm([values_of(gradient) for gradient in gradients], comm)
    clip = _clip_factor(grad_norm, config.max_grad_norm)

    if config.optimizer == "sgd" and not config.weight_decay:
        # (g * clip) * rate = g * (clip * rate): scaling the rate saves a pass over all gradients.
        # Rows of words outside the batch stay unchanged. TensorFlow applies constraints only to
        # whole variables.
        learning_rate *= clip
        gradients = [dense(g, v) if v.constraint else g for g, v in zip(gradients, variables)]
    else:
        gradients = [_whole(g, v, clip, config) for g, v in zip(gradients, variables)]
    optimizer = _UPDATES[config.optimizer](config, learning_rate)
    train_op = optimizer.apply_gradients(zip(gradients, variables), global_step)
    return Update(train_op, grad_norm, exchange.seconds)


def _clip_factor(grad_norm: tf.Tensor, max_grad_norm: float) -> tf.Tensor:
    """Return what brings the norm down to its maximum: 1 where it is below."""
    if max_grad_norm > float(tf.float32.max):  # no clipping: infinity over infinity would be NaN
        return tf.constant(1.0)
    # A norm of NaN makes the weights NaN: never a silent update.
    return max_grad_norm / tf.maximum(grad_norm, max_grad_norm)


def _whole(gradient: Gradient, variable: tf.Variable, clip: tf.Tensor, config: Config) -> tf.Tensor:
    """Return the clipped gradient of all rows, also of those that the batch has not: their
    velocity, their means and their weight decay go on, as they do in torch.optim."""
    gradient = dense(gradient, variable)
    if config.optimizer == "adam" or not config.weight_decay:
        return gradient * clip
    return gradient * clip + config.weight_decay * variable


def _global_norm(tensors: Sequence[tf.Tensor], comm: Communicator) -> tf.Tensor:
    norm = fastest().global_norm(tensors)
    # Ranks that clip by factors one bit apart would part: where it is not the same on all, they
    # take rank 0's.
    return norm if kernels.available() else comm.broadcast(norm, "grad_norm")
