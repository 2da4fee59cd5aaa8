"""The update of the weights: reduce the gradients, then clip them, then apply them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from lm import kernels
from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.model.network import Network
from lm.model.ops import fastest
from lm.training.gradients import Exchange, Gradient, dense, is_sparse, values_of


class Update(NamedTuple):
    """The operations of one optimizer step."""

    train_op: tf.Operation
    grad_norm: tf.Tensor  # float32 scalar: norm of the global gradient before clipping
    exchange_seconds: tf.Tensor  # float64 scalar: see `Exchange`


class _Adam(tf.train.AdamOptimizer):
    """Adam (Kingma & Ba 2015, algorithm 1) with decoupled weight decay.

    The weight decay follows Loshchilov & Hutter (2019), algorithm 2, as torch.optim.AdamW does.
    """

    def __init__(
        self, rate: tf.Tensor, beta1: float, beta2: float, epsilon: float, weight_decay: float
    ):
        super().__init__(rate, beta1, beta2, epsilon)
        self._weight_decay = weight_decay

    def _prepare(self):
        super()._prepare()
        # TensorFlow adds epsilon before the bias correction ("epsilon hat" in the paper).
        _, beta2_power = self._get_beta_accumulators()
        self._epsilon_t *= tf.sqrt(1 - beta2_power)

    def _resource_apply_dense(self, grad, var):
        decayed = []
        if self._weight_decay:
            with tf.control_dependencies([grad]):  # the gradient needs the weights before the decay
                decayed.append(var.assign(var * (1 - self._lr_t * self._weight_decay)))
        with tf.control_dependencies(decayed):
            return super()._resource_apply_dense(grad, var)


class _Adagrad(tf.train.AdagradOptimizer):
    """Adagrad (Duchi et al. 2011): sum += gradient^2; weights -= rate * gradient / sqrt(sum)."""

    def _create_slots(self, var_list):
        # TensorFlow would keep a constant of the size of each variable in memory.
        initial_value = tf.placeholder_with_default(self._initial_accumulator_value, [])
        for v in var_list:
            self._get_or_make_slot(v, tf.fill(v.shape, initial_value), "accumulator", self._name)


def _rmsprop(rate: tf.Tensor, decay: float, epsilon: float) -> tf.train.Optimizer:
    """Return RMSProp as in TF 1.x: weights -= rate * gradient / sqrt(mean + epsilon).

    The mean of the squared gradients (Tieleman & Hinton 2012) starts at 1.
    """
    return tf.train.RMSPropOptimizer(rate, decay, epsilon=epsilon)


class _Optimizer(NamedTuple):
    """An optimizer, which only knows the settings that are listed here."""

    build: Callable[..., tf.train.Optimizer]  # of the learning rate and the settings
    settings: tuple[str, ...] = ()  # fields of Config; without weight_decay, the gradient has it
    keeps_unused_rows: bool = False  # whether it only changes the rows of words in the batch


OPTIMIZERS = {
    "sgd": _Optimizer(tf.train.GradientDescentOptimizer, keeps_unused_rows=True),
    # velocity = momentum * velocity + gradient; weights -= rate * velocity, as in torch.optim.SGD.
    "momentum": _Optimizer(tf.train.MomentumOptimizer, ("momentum",)),
    "adam": _Optimizer(_Adam, ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")),
    "adagrad": _Optimizer(_Adagrad, ("adagrad_initial_value",), keeps_unused_rows=True),
    "rmsprop": _Optimizer(_rmsprop, ("rmsprop_decay", "rmsprop_epsilon")),
}
_OF_OPTIMIZERS = [name for each in OPTIMIZERS.values() for name in each.settings]
# The settings that a function of the config file replaces.
_REPLACED = {
    "build_optimizer": ["optimizer", *_OF_OPTIMIZERS, "weight_decay"],
    "transform_gradients": ["max_grad_norm"],
}


def build_update(
    config: Config,
    exchange: Exchange,
    learning_rate: tf.Tensor,
    global_step: tf.Variable,
    comm: Communicator,
    network: Network | None = None,
) -> Update:
    """Build the operations that clip the gradients of the global batch, and apply them.

    Clipping before the exchange would use a different norm on each rank, so the run would depend on
    the number of ranks. After the exchange, all ranks must compute bitwise identical values, even
    if their threads and devices differ. The network's config file may define `build_optimizer` and
    `transform_gradients`.
    """
    chosen = OPTIMIZERS[config.optimizer]
    variables, gradients = exchange.variables, exchange.gradients
    grad_norm = _global_norm([values_of(gradient) for gradient in gradients], comm)
    clip = _clip_factor(grad_norm, config.max_grad_norm)
    # The functions of the config file, or None.
    own = network.audit.start_update(network, global_step, _REPLACED) if network else None
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
        optimizer = chosen.build(learning_rate, *settings)
    # An optimizer of a config file may ignore the global step, so it does not receive it.
    with tf.control_dependencies([optimizer.apply_gradients(zip(gradients, variables))]):
        train_op = global_step.assign_add(1).op
    if own:
        own.check(train_op)
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
    norm = fastest().global_norm(tensors)
    # If clip factors differed in the last bit, the weights of the ranks would diverge. The
    # compiled norm is identical on all ranks. Otherwise, all ranks use the norm of rank 0.
    return norm if kernels.available() else comm.broadcast(norm, "grad_norm")
