"""The update of the weights: reduce the gradients, then clip them, then apply them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from lm import kernels, logger
from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.errors import UserError
from lm.model.context import Context
from lm.model.network import Network
from lm.model.ops import fastest
from lm.model.variables import check_kind
from lm.options import defaults
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
    defines = network.defines if network else lambda name: False
    chosen = OPTIMIZERS[config.optimizer]
    variables, gradients = exchange.variables, exchange.gradients
    grad_norm = _global_norm([values_of(gradient) for gradient in gradients], comm)
    clip = _clip_factor(grad_norm, config.max_grad_norm)
    is_own = defines("transform_gradients") or defines("build_optimizer")
    if is_own:
        _check_replaced(network)
        check_update = network.audit.start_update()
        # No micro-batch starts at row -1, so these random numbers differ from the network's.
        context = network.context(step=tf.identity(global_step), first_row=-1)
    if defines("transform_gradients"):
        gradients, clip = _transformed(network, variables, gradients, context), tf.constant(1.0)
    if defines("build_optimizer") or (chosen.keeps_unused_rows and not config.weight_decay):
        # A step with a large vocabulary is fast, because it only processes the words of the batch.
        # TensorFlow applies constraints only to whole variables.
        gradients = [dense(g, v) if v.constraint else g for g, v in zip(gradients, variables)]
        if config.optimizer == "sgd" and not defines("build_optimizer"):
            # (g * clip) * rate = g * (clip * rate): scaling the rate saves a pass over all
            # gradients.
            learning_rate *= clip
        else:
            gradients = [_scaled(gradient, clip) for gradient in gradients]
    else:
        decay = 0.0 if "weight_decay" in chosen.settings else config.weight_decay
        gradients = [_whole(g, v, clip, decay) for g, v in zip(gradients, variables)]
    if defines("build_optimizer"):
        optimizer = _user_optimizer(network, learning_rate, context)
    else:
        settings = [getattr(config, name) for name in chosen.settings]
        optimizer = chosen.build(learning_rate, *settings)
    # An optimizer of a config file may ignore the global step, so it does not receive it.
    with tf.control_dependencies([optimizer.apply_gradients(zip(gradients, variables))]):
        train_op = global_step.assign_add(1).op
    if is_own:
        for variable in tf.global_variables():  # including those of the user's optimizer
            check_kind(variable)
        check_update(train_op)
        if not learning_rate.consumers():
            logger.warning("build_optimizer ignores learning_rate, so the flag has no effect")
    return Update(train_op, grad_norm, exchange.seconds)


def _check_replaced(network: Network) -> None:
    """Reject settings that a function of the config file replaces."""
    config, unchanged = network.config, defaults(Config)
    of_optimizers = [name for each in OPTIMIZERS.values() for name in each.settings]
    replaced = {
        "build_optimizer": ["optimizer", *of_optimizers, "weight_decay"],
        "transform_gradients": ["max_grad_norm"],
    }
    for function, names in replaced.items():
        for name in names:
            if network.defines(function) and getattr(config, name) != unchanged[name]:
                raise UserError(
                    f"{network.where} defines {function}, so {name} has no effect: remove {name}"
                )


def _transformed(
    network: Network,
    variables: Sequence[tf.Variable],
    gradients: Sequence[Gradient],
    context: Context,
) -> list[Gradient]:
    by_name = {v.op.name: gradient for v, gradient in zip(variables, gradients)}
    found = network.call("transform_gradients", dict(by_name), context)
    if not isinstance(found, Mapping) or found.keys() != by_name.keys():
        raise UserError(
            f"{network.where}: transform_gradients must return a dictionary with the same names as"
            " its argument"
        )
    return [_checked_gradient(network, v, found[v.op.name]) for v in variables]


def _checked_gradient(network: Network, variable: tf.Variable, found: Any) -> Gradient:
    is_gradient = isinstance(found, (tf.Tensor, tf.IndexedSlices))
    if (
        not is_gradient or found.dtype != tf.float32
        or not found.shape.is_compatible_with(variable.shape)
    ):  # fmt: skip
        what = f"{found.dtype.name} {found.shape}" if is_gradient else f"a {type(found).__name__}"
        raise UserError(
            f"{network.where}: transform_gradients must return a float32 tensor {variable.shape}"
            f" for {variable.op.name}, not {what}"
        )
    return found


def _user_optimizer(
    network: Network, learning_rate: tf.Tensor, context: Context
) -> tf.train.Optimizer:
    found = network.call("build_optimizer", learning_rate, context)
    if not isinstance(found, tf.train.Optimizer):
        raise UserError(
            f"{network.where}: build_optimizer must return a tf.train.Optimizer, not a"
            f" {type(found).__name__}"
        )
    if type(found).compute_gradients is not tf.train.Optimizer.compute_gradients:
        raise UserError(
            f"{network.where}: compute_gradients of {type(found).__name__} is never called, because"
            " the trainer sums the gradients itself: use transform_gradients"
        )
    return found


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
