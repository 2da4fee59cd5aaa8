"""Pass values from a config file to the placeholders and initial states of a TF 1.x program."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from lm.errors import UserError
from lm.tf1.call import current_call, defining_classes, inform_once, replaced, warn_once
from lm.user.code import NOT_FED, current_line


@contextlib.contextmanager
def fed(
    *placeholders: tf.Tensor,
    zero_states: Sequence[Any] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Feed the placeholders and the initial states of a TF 1.x program in a network function.

    Args:
      placeholders: The tensors that the next calls of `tf.placeholder` return, in this order.
      zero_states: The states that the next calls of `zero_state` of cells return, in this order.
        For a MultiRNNCell, such a state is one tuple of LSTMStateTuple values.
      defaults: The values that calls of `tf.placeholder_with_default` return. The keys are the
        arguments `name` of the calls. For a second call with the same name, the suffix `_1` is
        added to the name. A call without a name has the name `PlaceholderWithDefault`.
    """
    call = current_call()
    if not call:
        raise UserError(
            "tf1.fed is called outside of a network function: call it inside a function such as"
            " build_logits"
        )
    call.placeholders, call.defaults = list(placeholders), dict(defaults or {})
    states = list(zero_states)
    originals = [(cls, vars(cls)["zero_state"]) for cls in cell_classes()] if states else []

    def zero_state(cell: Any, batch_size: Any, dtype: tf.DType) -> Any:
        if states:
            return states.pop(0)
        original = next(f for cls, f in originals if isinstance(cell, cls))
        return original(cell, batch_size, dtype)

    with contextlib.ExitStack() as stack:
        for cls, _ in originals:
            stack.enter_context(replaced(cls, {"zero_state": zero_state}))
        yield
    if call.placeholders or states:
        raise UserError(
            f"tf1.fed: the program did not use the last {len(call.placeholders)} placeholders and"
            f" {len(states)} states"
        )
    if call.defaults:
        raise UserError(
            f"tf1.fed: the program does not call tf.placeholder_with_default with the name"
            f" {' or '.join(call.defaults)}"
        )


def cell_classes() -> list[type]:
    """Return the classes that define `zero_state`, with subclasses before their base classes."""
    return defining_classes(tf.nn.rnn_cell.RNNCell, "zero_state")


def placeholder(dtype: Any, shape: Any = None, name: str | None = None) -> tf.Tensor:
    """Return the next tensor of `fed`, or create a placeholder."""
    call = current_call()
    if not call:
        return tf.placeholder(dtype, shape, name)
    dtype = tf.as_dtype(dtype)
    if call.placeholders:
        return _converted(call.placeholders.pop(0), dtype, shape, name or "")
    if call.words is not None and dtype.is_integer and (shape is None or len(shape) == 2):
        if call.context.training:
            shown = f"the placeholder {name}" if name else "this placeholder"
            inform_once(
                f"{current_line()}: {shown} receives the words; pass other values to tf1.fed"
            )
        return _converted(call.words, dtype, shape, name or "")
    return tf.placeholder(dtype, shape, f"{name or 'placeholder'}{NOT_FED}")


def placeholder_with_default(input: Any, shape: Any, name: str | None = None) -> tf.Tensor:
    """Return the value that `fed` has for this name, or the default."""
    call = current_call()
    if not call:
        return tf.placeholder_with_default(input, shape, name)
    key = name or "PlaceholderWithDefault"
    call.default_names[key] += 1
    if call.default_names[key] > 1:
        key = f"{key}_{call.default_names[key] - 1}"
    default = tf.convert_to_tensor(input)
    if key in call.defaults:
        return _converted(call.defaults.pop(key), default.dtype, shape, key)
    if call.context.training:
        warn_once(
            f"{current_line()}: tf.placeholder_with_default keeps its default in training: pass"
            f" defaults={{{key!r}: value}} to tf1.fed"
        )
    return tf.placeholder_with_default(default, shape, name)


def _converted(value: Any, dtype: tf.DType, shape: Any, name: str) -> tf.Tensor:
    """Convert a value to the type of a placeholder, and check that its shape and values fit."""
    value = tf.convert_to_tensor(value)
    is_known = shape is None or not any(isinstance(size, tf.Tensor) for size in shape)
    if is_known and not value.shape.is_compatible_with(shape):
        raise UserError(f"tf1.fed: placeholder {name} has the shape {shape}, not {value.shape}")
    converted = tf.cast(value, dtype)
    if dtype.is_floating or dtype == value.dtype or _contains(dtype, value.dtype):
        return converted
    # The message contains the line, because errors at run time do not show where it is.
    where = f"{current_line()}: placeholder {name}".rstrip()
    message = f"{where} is {dtype.name}, and a value of tf1.fed does not fit"
    same = tf.debugging.assert_equal(tf.cast(converted, value.dtype), value, message=message)
    with tf.control_dependencies([same]):
        return tf.identity(converted)


def _contains(dtype: tf.DType, other: tf.DType) -> bool:
    """Return whether an integer type contains all values of another integer type."""
    are_integers = dtype.is_integer and other.is_integer
    return are_integers and dtype.min <= other.min and other.max <= dtype.max
