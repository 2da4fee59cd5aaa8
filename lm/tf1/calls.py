"""Calls of the functions of a config file that has loaded TF 1.x modules.

During a call, sizes of shapes have `.value`, and TensorFlow's random operations draw from the seed
of the network's context. So unedited dropout and noise depend only on the seed, the step, the call
and the rows. The program's optimizer has no effect, because the trainer updates the weights.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_shape
from tensorflow.python.ops import gen_candidate_sampling_ops, gen_random_ops, nn_ops
from tensorflow.python.ops import while_loop as loops

from lm import logger
from lm.model.context import Context
from lm.model.variables import operations_behind
from lm.tf1.draws import (
    counting_loop,
    seed_of_iteration,
    stateless_operations,
    stateless_samplers,
)

_active: list[Call] = []  # the calls of functions with a context


class Call:
    """A call of a network function."""

    def __init__(self, context: Context):
        self.context = context
        self.seeds: set[tf.Operation] = set()  # operations of the seeds that the call has drawn
        self.loops: list[tf.Tensor] = []  # indices of the iterations of the surrounding loops
        self.names: set[str] = set()  # of variables
        self.placeholders: list[tf.Tensor] = []  # values of the next calls of tf.placeholder
        self.defaults: dict[str, Any] = {}  # values for tf.placeholder_with_default, by name
        self.default_names: collections.Counter = collections.Counter()  # of these calls
        self.scope: tf.VariableScope | None = None
        self._name_scope = tf.get_default_graph().get_name_scope()

    def seed(self) -> tf.Tensor:
        seed = self.context.seed()
        self.seeds.add(seed.op)
        return seed_of_iteration(seed, self.loops)

    def new_name(self, name: str) -> str:
        """Return the name of a new `tf.Variable`: as in TF 1.x, unique in its name scope."""
        while True:
            unique = tf.get_default_graph().unique_name(name)
            unique = unique.removeprefix(f"{self._name_scope}/")
            if unique not in self.names:
                return unique


def current_call() -> Call | None:
    """Return the innermost call of a network function."""
    return _active[-1] if _active else None


def adapt(function: Callable) -> Callable:
    """Adapt a function of a config file to TF 1.x modules."""

    @functools.wraps(function)
    def adapted(*arguments: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(v1_behavior())
            if arguments and isinstance(arguments[-1], Context):
                stack.enter_context(_draws_from(arguments[-1]))
            return function(*arguments)

    return adapted


@contextlib.contextmanager
def v1_behavior() -> Iterator[None]:
    """Let the sizes of a shape be objects with `.value`, as in TF 1.x, without deprecations."""
    messages, level = tf.get_logger(), tf.logging.get_verbosity()
    messages.addFilter(_forward)
    tf.logging.set_verbosity(tf.logging.WARN)
    try:
        with (
            replaced(tensor_shape, {"_TENSORSHAPE_V2_OVERRIDE": False}),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message=".*is deprecated and will be removed")
            yield
    finally:
        tf.logging.set_verbosity(level)
        messages.removeFilter(_forward)


def _forward(record: logging.LogRecord) -> bool:
    """Filter TensorFlow's messages: forward warnings to the log, except deprecations."""
    message = record.getMessage()
    if record.levelno == logging.WARNING and "deprecated" not in message:
        logger.warning("TensorFlow: %s", message)
    return record.levelno > logging.WARNING


@functools.cache
def warn_once(message: str) -> None:
    logger.warning(message)


def _apply_nothing(optimizer: tf.train.Optimizer, *arguments: Any, **options: Any) -> tf.Operation:
    if _active[-1].context.training:
        warn_once(
            f"the program's {type(optimizer).__name__} is not used: set --optimizer and"
            " --learning_rate, or define build_optimizer"
        )
    return tf.no_op()


@contextlib.contextmanager
def _draws_from(context: Context) -> Iterator[None]:
    """Make random operations use the seed of a context, and ignore the program's optimizer.

    Initial values have the seeds of their variables.
    """
    call = Call(context)

    def get_variable(getter: Callable, name: str, *arguments: Any, **options: Any) -> tf.Variable:
        call.names.add(name)
        initializer = options.get("initializer")
        if isinstance(initializer, tf.Tensor):
            _seed_by_name(initializer, name, call)
        with replaced(gen_random_ops, originals):  # initializers have the seeds of variables
            return getter(name, *arguments, **options)

    stateless = stateless_operations(call.seed)
    samplers = stateless_samplers(call.seed)
    while_loop = counting_loop(loops.while_loop, call.loops)
    originals = {name: getattr(gen_random_ops, name) for name in stateless}
    dropout = nn_ops._dropout
    in_training = dropout if context.training else lambda x, *others, **options: x
    _active.append(call)
    try:
        with (
            replaced(gen_random_ops, stateless),
            replaced(gen_candidate_sampling_ops, samplers),
            replaced(loops, {"while_loop": while_loop}),
            replaced(nn_ops, {"_dropout": in_training}),
            replaced(tf.train.Optimizer, {"apply_gradients": _apply_nothing}),
            tf.variable_scope(
                tf.get_variable_scope(), custom_getter=get_variable, auxiliary_name_scope=False
            ) as call.scope,
        ):
            call.scope.set_initializer(None)  # TensorFlow's default
            yield
    finally:
        _active.pop()


def _seed_by_name(initial_value: tf.Tensor, name: str, call: Call) -> None:
    """Let an initial value that was drawn in a call depend only on the seed and its name."""
    own = [zlib.crc32(name.encode()) >> 1, call.context.config.seed % 2**31]
    for op in operations_behind(initial_value):
        for index, tensor in enumerate(op.inputs):
            if tensor.op in call.seeds:
                op._update_input(index, tf.constant(own, tf.int32))


@contextlib.contextmanager
def replaced(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of a module."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def create_variable(
    initial_value: Any = None,
    trainable: bool = True,
    collections: Any = None,
    validate_shape: bool = True,
    caching_device: Any = None,
    name: str | None = None,
    variable_def: Any = None,
    dtype: Any = None,
    **options: Any,
) -> tf.Variable:
    """Create a `tf.Variable` with `tf.get_variable`, so that all calls of a network share it.

    As in TF 1.x, its name begins with the name scope.
    """
    call = current_call()
    if not call:
        return tf.Variable(initial_value, trainable, name=name, dtype=dtype)
    value = initial_value() if callable(initial_value) else initial_value
    value = tf.convert_to_tensor(value, dtype)
    with tf.variable_scope(call.scope, auxiliary_name_scope=False):
        return tf.get_variable(
            call.new_name(name or "Variable"),
            dtype=value.dtype,
            initializer=value,
            trainable=trainable,
        )


def while_loop(*arguments: Any, **options: Any) -> Any:
    """Call `tf.while_loop`, which counts its iterations during a call of a network function."""
    return loops.while_loop(*arguments, **options)
