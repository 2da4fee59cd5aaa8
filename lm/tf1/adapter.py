"""Adapts the functions of a config file that has loaded TF 1.x modules.

During a call, sizes of shapes have `.value`, and TensorFlow's random operations draw from the seed
of the network's context. So unedited dropout and noise depend only on the seed, the step, the call
and the rows. The program's optimizer has no effect, because the trainer updates the weights.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import tensor_shape
from tensorflow.python.ops import gen_candidate_sampling_ops, gen_random_ops, nn_ops
from tensorflow.python.ops import while_loop as loops

from lm import logger
from lm.model.context import Context
from lm.model.variables import operations_behind
from lm.tf1.call import Call, active, current_call, replaced
from lm.tf1.draws import counting_loop, stateless_operations, stateless_samplers
from lm.tf1.inert import global_step, without_training
from lm.tf1.keras import shared_layers


def adapt(function: Callable) -> Callable:
    """Adapt a function of a config file to TF 1.x modules."""

    @functools.wraps(function)
    def adapted(*arguments: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(v1_behavior())
            if arguments and isinstance(arguments[-1], Context):
                stack.enter_context(_draws_from(arguments[-1]))
                stack.enter_context(without_training())
            return function(*arguments)

    return adapted


@contextlib.contextmanager
def v1_behavior() -> Iterator[None]:
    """Let the sizes of a shape be objects with `.value`, as in TF 1.x, without deprecations.

    Output of the program goes to stderr, because commands such as `lm.score` print results.
    """
    messages, level = tf.get_logger(), tf.logging.get_verbosity()
    messages.addFilter(_forward)
    tf.logging.set_verbosity(tf.logging.WARN)
    try:
        with (
            replaced(tensor_shape, {"_TENSORSHAPE_V2_OVERRIDE": False}),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(sys.stderr),
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


@contextlib.contextmanager
def _draws_from(context: Context) -> Iterator[None]:
    """Make random operations use the seed of a context, except in initial values.

    Initial values have the seeds of their variables.
    """
    call = Call(context)

    def get_variable(getter: Callable, name: str, *arguments: Any, **options: Any) -> tf.Variable:
        call.names.add(name)
        if name.rpartition("/")[2] == tf.GraphKeys.GLOBAL_STEP:
            return global_step(options.get("dtype") or tf.int64)
        if constraint := options.get("constraint"):  # the optimizer calls it
            options["constraint"] = adapt(constraint)
        initializer = options.get("initializer")
        if isinstance(initializer, tf.Tensor):
            _seed_by_name(initializer, name, call)
        with replaced(gen_random_ops, originals):  # initializers have the seeds of variables
            variable = getter(name, *arguments, **options)
        if partitioner := options.get("partitioner"):
            call.shards[variable.name], *_ = partitioner(
                shape=variable.shape, dtype=variable.dtype.base_dtype
            )
        return variable

    stateless = stateless_operations(call.seed)
    samplers = stateless_samplers(call.seed)
    while_loop = counting_loop(loops.while_loop, call.loops)
    originals = {name: getattr(gen_random_ops, name) for name in stateless}
    dropout = nn_ops._dropout
    in_training = dropout if context.training else lambda x, *others, **options: x
    active.append(call)
    try:
        with (
            replaced(gen_random_ops, stateless),
            replaced(gen_candidate_sampling_ops, samplers),
            replaced(loops, {"while_loop": while_loop}),
            replaced(nn_ops, {"_dropout": in_training}),
            shared_layers(create_variable, context.training),
            tf.variable_scope(
                tf.get_variable_scope(), custom_getter=get_variable, auxiliary_name_scope=False
            ) as call.scope,
        ):
            call.scope.set_initializer(None)  # TensorFlow's default
            yield
    finally:
        active.pop()


def _seed_by_name(initial_value: tf.Tensor, name: str, call: Call) -> None:
    """Let an initial value that was drawn in a call depend only on the seed and its name."""
    behind = operations_behind(initial_value)
    draws = [op for op in behind if op in call.seeds]
    for op in behind:
        for index, tensor in enumerate(op.inputs):
            if tensor.op in call.seeds:
                number = draws.index(tensor.op)
                key = zlib.crc32((f"{name}/{number}" if number else name).encode()) >> 1
                own = [key, call.context.config.seed % 2**31]
                op._update_input(index, tf.constant(own, tf.int32))


def create_variable(
    initial_value: Any = None,
    trainable: bool = True,
    collections: Any = None,
    validate_shape: bool = True,
    caching_device: Any = None,
    name: str | None = None,
    variable_def: Any = None,
    dtype: Any = None,
    constraint: Any = None,
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
            trainable=trainable and value.dtype.is_floating,  # TF 1.x trains no other types
            collections=collections,
            constraint=constraint,
        )


def while_loop(*arguments: Any, **options: Any) -> Any:
    """Call `tf.while_loop`, which counts its iterations during a call of a network function."""
    return loops.while_loop(*arguments, **options)
