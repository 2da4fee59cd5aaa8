"""The functions of a config file that take part in the update, and the checks of their results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from lm import logger
from lm.config import Config
from lm.errors import UserError
from lm.model.network import Network
from lm.model.variables import check_kind, check_no_graph_seed, seed_initial_value
from lm.options import defaults
from lm.system import seeded

Gradient = tf.Tensor | tf.IndexedSlices


class UserUpdate:
    """An update with `build_optimizer`, `transform_gradients` or constraints of variables.

    Args:
      replaced: The fields of Config that each function replaces.
      check_reproducible: Checks the operation of the update for a number of ranks.
    """

    def __init__(
        self,
        network: Network,
        global_step: tf.Variable,
        replaced: Mapping[str, Sequence[str]],
        check_reproducible: Callable[[tf.Operation, int], None],
    ):
        self._network, self._check_reproducible = network, check_reproducible
        self._learning_rate: tf.Tensor | None = None
        self.builds_optimizer = network.defines("build_optimizer")
        self._check_replaced(replaced)
        # No micro-batch starts at row -1, so the network draws different random numbers.
        self._context = network.context(step=tf.identity(global_step), first_row=-1)

    def _check_replaced(self, replaced: Mapping[str, Sequence[str]]) -> None:
        network, unchanged = self._network, defaults(Config)
        for function, names in replaced.items():
            for name in names:
                is_changed = getattr(network.config, name) != unchanged[name]
                if network.defines(function) and is_changed:
                    raise UserError(
                        f"{network.where} defines {function}, so {name} has no effect: remove"
                        f" {name}"
                    )

    def transform_gradients(
        self, variables: Sequence[tf.Variable], gradients: Sequence[Gradient], clip: tf.Tensor
    ) -> tuple[Sequence[Gradient], tf.Tensor]:
        """Return the gradients to apply, and the factor that clips them."""
        network = self._network
        if not network.defines("transform_gradients"):
            return gradients, clip
        by_name = {v.op.name: gradient for v, gradient in zip(variables, gradients)}
        with seeded(network.config.seed):
            found = network.call("transform_gradients", dict(by_name), self._context)
        if not isinstance(found, Mapping) or found.keys() != by_name.keys():
            raise UserError(
                f"{network.where}: transform_gradients must return a dictionary with the same names"
                " as its argument"
            )
        checked = [_checked_gradient(network.where, v, found[v.op.name]) for v in variables]
        return checked, tf.constant(1.0)

    def build_optimizer(self, learning_rate: tf.Tensor) -> tf.train.Optimizer:
        """Return the optimizer of the config file."""
        self._learning_rate, where = learning_rate, self._network.where
        with seeded(self._network.config.seed):
            found = self._network.call("build_optimizer", learning_rate, self._context)
        if not isinstance(found, tf.train.Optimizer):
            raise UserError(
                f"{where}: build_optimizer must return a tf.train.Optimizer, not a"
                f" {type(found).__name__}"
            )
        if type(found).compute_gradients is not tf.train.Optimizer.compute_gradients:
            raise UserError(
                f"{where}: compute_gradients of {type(found).__name__} is never called, because the"
                " trainer sums the gradients itself: use transform_gradients"
            )
        _use_old_functions(found)
        return found

    def check(self, train_op: tf.Operation, num_ranks: int) -> None:
        """Check the operation of the whole update."""
        for variable in tf.global_variables():  # includes the variables of the user's optimizer
            check_kind(variable)
            seed_initial_value(variable, self._network.config.seed)
        check_no_graph_seed(self._network.where)
        self._check_reproducible(train_op, num_ranks)
        if self._learning_rate is not None and not self._learning_rate.consumers():
            logger.warning("build_optimizer ignores learning_rate, so the flag has no effect")


def _use_old_functions(optimizer: tf.train.Optimizer) -> None:
    """Make an optimizer for the variables of TF 1.x work with resource variables."""

    def apply_sparse(values: tf.Tensor, variable: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        gradient = tf.IndexedSlices(values, indices, tf.shape(variable))
        try:
            return optimizer._apply_sparse(gradient, variable)
        except NotImplementedError:
            return optimizer._resource_apply_dense(tf.convert_to_tensor(gradient), variable)

    if _overrides(optimizer, "_apply_dense", "_resource_apply_dense"):
        optimizer._resource_apply_dense = optimizer._apply_dense
    if _overrides(optimizer, "_apply_sparse", "_resource_apply_sparse"):
        optimizer._resource_apply_sparse = apply_sparse


def _overrides(optimizer: tf.train.Optimizer, old: str, new: str) -> bool:
    """Return whether a more derived class defines the old function than the new function."""
    classes = type(optimizer).__mro__
    defines_old, defines_new = (
        next(i for i, cls in enumerate(classes) if name in vars(cls)) for name in (old, new)
    )
    return defines_old < defines_new


def _checked_gradient(where: str, variable: tf.Variable, found: Any) -> Gradient:
    is_gradient = isinstance(found, Gradient)
    if (
        not is_gradient or found.dtype != tf.float32
        or not found.shape.is_compatible_with(variable.shape)
    ):  # fmt: skip
        what = f"{found.dtype.name} {found.shape}" if is_gradient else f"a {type(found).__name__}"
        raise UserError(
            f"{where}: transform_gradients must return a float32 tensor {variable.shape} for"
            f" {variable.op.name}, not {what}"
        )
    return found
