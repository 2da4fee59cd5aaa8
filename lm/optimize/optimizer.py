"""The update of the weights: clip the exchanged gradients, then apply them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from lm import kernels
from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.model.ops import implementation
from lm.optimize.algorithms import OPTIMIZERS
from lm.optimize.gradients import Exchange
from lm.optimize.sparse import Gradient, dense, is_sparse, values_of


class Update(NamedTuple):
    """The operations of one optimizer step."""

    train_op: tf.Operation
    grad_norm: tf.Tensor  # float32 scalar: norm of the global gradient before clipping
    exchange_seconds: tf.Tensor  # float64 scalar: see `Exchange`


def build_update(
    config: Config,
    exchange: Exchange,
    learning_rate: tf.Tensor,
    global_step: tf.Variable,
    comm: Communicator,
    own: Any = None,
) -> Update:
    """Build the operations that clip the gradients of the global batch, and apply them.

    Clipping before the exchange would use a different norm on each rank, so the run would depend on
    the number of ranks. After the exchange, all ranks must compute bitwise identical values, even
    if their threads and devices differ. `own` is the `UserUpdate` of a config file whose
    functions take part in the update.
    """
    chosen = OPTIMIZERS[config.optimizer]
    variables, gradients = exchange.variables, exchange.gradients
    grad_norm = _global_norm([values_of(gradient) for gradient in gradients], comm)
    clip = _clip_factor(grad_norm, config.max_grad_norm)
    if own:
        gradients, clip = own.transform_gradients(variables, gradients, clip)
    has_own_optimizer = own is not None and own.builds_optimizer
    if has_own_optimizer or (chosen.keeps_unused_rows and not config.weight_decay):
        # A step with a large vocabulary is fast, because it only processes the words of the batch.
        # TensorFlow applies constraints only to whole variables.
        gradients = [dense(g, v) if v.constraint else g for g, v in zip(gradients, variables)]
        if config.optimizer == "sgd" and not has_own_optimizer:
            # (g * clip) * rate = g * (clip * rate): scaling the rate saves a pass over all
            # gradients.
            learning_rate *= clip
        else:
            gradients = [_scaled(gradient, clip) for gradient in gradients]
    else:
        decay = 0.0 if "weight_decay" in chosen.settings else config.weight_decay
        gradients = [_whole(g, v, clip, decay) for g, v in zip(gradients, variables)]
    if has_own_optimizer:
        optimizer = own.build_optimizer(learning_rate)
    else:
        settings = [getattr(config, name) for name in chosen.settings]
        optimizer = chosen.create(learning_rate, *settings)
    # An optimizer of a config file may ignore the global step, so it does not receive it.
    with tf.control_dependencies([optimizer.apply_gradients(zip(gradients, variables))]):
        train_op = global_step.assign_add(1).op
    if own:
        own.check(train_op, comm.size)
    return Update(train_op, grad_norm, exchange.seconds)


def _scaled(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    if is_sparse(gradient):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _clip_factor(grad_norm: tf.Tensor, max_grad_norm: float) -> tf.Tensor:
    """Return the factor that reduces the norm to its maximum; 1 for smaller norms."""
    if max_grad_norm > float(tf.float32.max):  # no clipping; infinity / infinity would be NaN
        return tf.constant(1.0)
    # If the norm is NaN, the weights become NaN: no update fails silently.
    return max_grad_norm / tf.maximum(grad_norm, max_grad_norm)


def _whole(gradient: Gradient, variable: tf.Variable, clip: tf.Tensor, decay: float) -> tf.Tensor:
    """Return the clipped gradient of all rows, with the weight decay.

    Rows of words outside the batch need their velocity, means and weight decay too, as in
    torch.optim.
    """
    gradient = dense(gradient, variable) * clip
    return gradient + decay * variable if decay else gradient


def _global_norm(tensors: Sequence[tf.Tensor], comm: Communicator) -> tf.Tensor:
    norm = implementation().global_norm(tensors)
    # If clip factors differed in the last bit, the weights of the ranks would diverge. The
    # compiled norm is identical on all ranks. Otherwise, all ranks use the norm of rank 0.
    return norm if kernels.available() else comm.broadcast(norm, "grad_norm")
