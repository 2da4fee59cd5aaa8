"""The optimizers that a config can select.

An optimizer is an entry of `OPTIMIZERS`. Its name is a choice of `Config.optimizer`.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow.compat.v1 as tf


class _Adam(tf.train.AdamOptimizer):
    """Adam (Kingma & Ba 2015, algorithm 1) with decoupled weight decay.

    As in torch.optim.AdamW, the decay is the learning rate times `weight_decay`. Algorithm 2 of
    Loshchilov & Hutter (2019) multiplies it only by the factor of the schedule.
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

    # Version 2 divides by the square root. Version 1 uses the CPU's approximation of 1 / sqrt(x).
    def _resource_apply_dense(self, grad, var):
        total = self.get_slot(var, "accumulator")
        rate = tf.cast(self._learning_rate_tensor, grad.dtype)
        return tf.raw_ops.ResourceApplyAdagradV2(
            var=var.handle, accum=total.handle, lr=rate, epsilon=tf.zeros([], grad.dtype), grad=grad
        )

    def _resource_apply_sparse(self, grad, var, indices):
        total = self.get_slot(var, "accumulator")
        rate = tf.cast(self._learning_rate_tensor, grad.dtype)
        return tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=var.handle, accum=total.handle, lr=rate, epsilon=tf.zeros([], grad.dtype),
            grad=grad, indices=indices,
        )  # fmt: skip


def _rmsprop(rate: tf.Tensor, decay: float, epsilon: float) -> tf.train.Optimizer:
    """Return RMSProp as in TF 1.x: weights -= rate * gradient / sqrt(mean + epsilon).

    The mean of the squared gradients (Tieleman & Hinton 2012) starts at 1.
    """
    return tf.train.RMSPropOptimizer(rate, decay, epsilon=epsilon)


class _Optimizer(NamedTuple):
    """An optimizer, which only knows the settings that are listed here."""

    create: Callable[..., tf.train.Optimizer]  # arguments: the learning rate and the settings
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
_SETTINGS = [name for each in OPTIMIZERS.values() for name in each.settings]
# The settings that each function of a config file replaces.
REPLACED = {
    "build_optimizer": ["optimizer", *_SETTINGS, "weight_decay"],
    "transform_gradients": ["max_grad_norm"],
}
