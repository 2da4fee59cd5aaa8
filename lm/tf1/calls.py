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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_shape
from tensorflow.python.ops import gen_random_ops, nn_ops

from lm import logger
from lm.errors import UserError
from lm.model.context import Context
from lm.model.variables import operations_behind
from lm.user.code import NOT_FED

_active: list[_Call] = []  # the calls of functions with a context


class _Call:
    """A call of a network function."""

    def __init__(self, context: Context):
        self.context = context
        self.seeds: set[tf.Operation] = set()  # operations of the seeds that the call has drawn
        self.names: collections.Counter = collections.Counter()  # variables by name
        self.placeholders: list[tf.Tensor] = []  # values of the next calls of tf.placeholder

    def seed(self) -> tf.Tensor:
        seed = self.context.seed()
        self.seeds.add(seed.op)
        return seed


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
            _replaced(tensor_shape, {"_TENSORSHAPE_V2_OVERRIDE": False}),
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
def _warn_once(message: str) -> None:
    logger.warning(message)


def _apply_nothing(optimizer: tf.train.Optimizer, *arguments: Any, **options: Any) -> tf.Operation:
    if _active[-1].context.training:
        _warn_once(
            f"the program's {type(optimizer).__name__} is not used: set --optimizer and"
            " --learning_rate, or define build_optimizer"
        )
    return tf.no_op()


@contextlib.contextmanager
def _draws_from(context: Context) -> Iterator[None]:
    """Make random operations use the seed of a context, and ignore the program's optimizer.

    Initial values have the seeds of their variables.
    """
    call = _Call(context)

    def get_variable(getter: Callable, name: str, *arguments: Any, **options: Any) -> tf.Variable:
        initializer = options.get("initializer")
        if isinstance(initializer, tf.Tensor):
            _seed_by_name(initializer, name, call)
        with _replaced(gen_random_ops, originals):  # initializers have the seeds of variables
            return getter(name, *arguments, **options)

    stateless = _stateless_operations(call.seed)
    originals = {name: getattr(gen_random_ops, name) for name in stateless}
    dropout = nn_ops._dropout
    in_training = dropout if context.training else lambda x, *others, **options: x
    _active.append(call)
    try:
        with (
            _replaced(gen_random_ops, stateless),
            _replaced(nn_ops, {"_dropout": in_training}),
            _replaced(tf.train.Optimizer, {"apply_gradients": _apply_nothing}),
            tf.variable_scope(
                tf.get_variable_scope(), custom_getter=get_variable, auxiliary_name_scope=False
            ),
        ):
            yield
    finally:
        _active.pop()


def _stateless_operations(seed: Callable[[], tf.Tensor]) -> dict[str, Callable]:
    """Return replacements for the functions of `gen_random_ops`, by name."""

    def uniform(shape, dtype, name=None, **seeds):
        return tf.random.stateless_uniform(shape, seed(), dtype=dtype, name=name)

    def uniform_int(shape, minval, maxval, name=None, **seeds):
        dtype = tf.convert_to_tensor(minval).dtype
        return tf.random.stateless_uniform(shape, seed(), minval, maxval, dtype, name)

    def normal(shape, dtype, name=None, **seeds):
        return tf.random.stateless_normal(shape, seed(), dtype=dtype, name=name)

    def truncated_normal(shape, dtype, name=None, **seeds):
        return tf.random.stateless_truncated_normal(shape, seed(), dtype=dtype, name=name)

    def multinomial(logits, num_samples, output_dtype=tf.int64, name=None, **seeds):
        return tf.random.stateless_categorical(logits, num_samples, seed(), output_dtype, name)

    def shuffle(value, name=None, **seeds):
        return tf.random.experimental.stateless_shuffle(value, seed(), name=name)

    return {
        "random_uniform": uniform,
        "random_uniform_int": uniform_int,
        "random_standard_normal": normal,
        "truncated_normal": truncated_normal,
        "multinomial": multinomial,
        "random_shuffle": shuffle,
    }


def _seed_by_name(initial_value: tf.Tensor, name: str, call: _Call) -> None:
    """Let an initial value that was drawn in a call depend only on the seed and its name."""
    own = [zlib.crc32(name.encode()) >> 1, call.context.config.seed % 2**31]
    for op in operations_behind(initial_value):
        for index, tensor in enumerate(op.inputs):
            if tensor.op in call.seeds:
                op._update_input(index, tf.constant(own, tf.int32))


@contextlib.contextmanager
def _replaced(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of a module."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextlib.contextmanager
def fed(*placeholders: tf.Tensor, zero_states: Sequence[Any] = ()) -> Iterator[None]:
    """Feed the placeholders and the initial states of a TF 1.x program in a network function.

    Args:
      placeholders: The tensors that the next calls of `tf.placeholder` return, in their order.
      zero_states: The states that the next calls of `zero_state` of cells return, in their order,
        such as one tuple of LSTMStateTuple for a MultiRNNCell.
    """
    if not _active:
        raise UserError(
            "tf1.fed is for the functions of a network, such as build_logits: call it in these"
        )
    _active[-1].placeholders = list(placeholders)
    states = list(zero_states)
    originals = [(cls, vars(cls)["zero_state"]) for cls in _cell_classes()] if states else []

    def zero_state(cell: Any, batch_size: Any, dtype: tf.DType) -> Any:
        if states:
            return states.pop(0)
        original = next(f for cls, f in originals if isinstance(cell, cls))
        return original(cell, batch_size, dtype)

    with contextlib.ExitStack() as stack:
        for cls, _ in originals:
            stack.enter_context(_replaced(cls, {"zero_state": zero_state}))
        yield
    unused = len(_active[-1].placeholders), len(states)
    if any(unused):
        raise UserError(
            f"tf1.fed: the program did not use the last {unused[0]} placeholders and {unused[1]}"
            " states"
        )


def _cell_classes() -> list[type]:
    """Return the classes that define `zero_state`; subclasses come first."""
    cells = tf.nn.rnn_cell
    return [cells.DropoutWrapper.__mro__[1], cells.MultiRNNCell, cells.RNNCell]


def placeholder(dtype: Any, shape: Any = None, name: str | None = None) -> tf.Tensor:
    """Return the next tensor of `fed`, or create a placeholder."""
    if not _active:
        return tf.placeholder(dtype, shape, name)
    if not _active[-1].placeholders:
        return tf.placeholder(dtype, shape, f"{name or 'placeholder'}{NOT_FED}")
    value = tf.cast(_active[-1].placeholders.pop(0), dtype)
    is_known = shape is None or not any(isinstance(size, tf.Tensor) for size in shape)
    if is_known and not value.shape.is_compatible_with(shape):
        raise UserError(
            f"tf1.fed: placeholder {name or ''} has the shape {shape}, not {value.shape}"
        )
    return value


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

    As in TF 1.x, a name that the scope has already used gets a suffix.
    """
    if not _active:
        return tf.Variable(initial_value, trainable, name=name, dtype=dtype)
    name = name or "Variable"
    scoped = f"{tf.get_variable_scope().name}/{name}"
    count = _active[-1].names[scoped]
    _active[-1].names[scoped] += 1
    value = initial_value() if callable(initial_value) else initial_value
    value = tf.convert_to_tensor(value, dtype)
    return tf.get_variable(
        f"{name}_{count}" if count else name,
        dtype=value.dtype,
        initializer=value,
        trainable=trainable,
    )
