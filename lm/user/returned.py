"""Checks of the values that the functions of a user's network return."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from lm.errors import UserError

_STATE_TYPES = ("float32", "int32")


def checked_state(path: str, found: Any) -> dict[str, tuple[list[int], str]]:
    """Return the result of `state_shapes`: sizes and types by name."""
    where = (
        f"{path}: state_shapes must return names with lists of sizes, such as {{'h': [200]}} or"
        " {'ids': ([3], 'int32')}"
    )
    if not isinstance(found, Mapping):
        raise UserError(f"{where}, not {found!r}")
    state = {}
    for name, part in found.items():
        has_type = isinstance(part, tuple) and len(part) == 2 and part[1] in _STATE_TYPES
        shape, dtype = part if has_type else (part, "float32")
        if not isinstance(shape, (list, tuple)) or not all(
            type(size) is int and size > 0 for size in shape
        ):
            raise UserError(f"{where}; the shape of {name!r} is {part!r}")
        state[name] = list(shape), dtype
    return state


def checked_result(
    where: str,
    found: Any,
    what: str,
    shape: Sequence[int | None],
    state_parts: Mapping[str, tuple[Sequence[int], str]],
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Return the result of a function of the network with known shapes.

    If a shape is unknown before the run, the graph checks it. `what` is "outputs", "logits" or
    "losses". `shape` is the expected shape. None means an unknown B, or any number of units.
    """
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise UserError(f"{where} must return ({what}, new_state), not {_described(found)}")
    top, state = found
    top = _checked_tensor(where, what, top, shape)
    if what == "outputs" and top.shape.as_list()[-1] is None:
        raise UserError(f"{where}: the size of the last axis of {what} must be known")
    if not isinstance(state, Mapping):
        raise UserError(f"{where}: new_state must be a dictionary, not {_described(state)}")
    expected, names = sorted(state_parts), sorted(map(str, state))
    if names != expected:
        raise UserError(f"{where}: new_state has {names}, but state_shapes has {expected}")
    return top, {
        name: _checked_tensor(where, f"new_state[{name!r}]", state[name], [shape[1], *sizes], dtype)
        for name, (sizes, dtype) in state_parts.items()
    }


def _checked_tensor(
    where: str, what: str, found: Any, shape: Sequence[int | None], dtype: str = "float32"
) -> tf.Tensor:
    if not _is_tensor(found):
        raise UserError(f"{where}: {what} must be a tensor, not {_described(found)}")
    if found.dtype.base_dtype != dtype:
        raise UserError(f"{where}: {what} must be {dtype}, not {found.dtype.base_dtype.name}")
    text = f"({', '.join('any' if size is None else str(size) for size in shape)})"
    if not found.shape.is_compatible_with(shape):
        raise UserError(f"{where}: {what} must have the shape {text}, not {found.shape}")
    known = found.shape.merge_with(shape)
    return found if known.as_list() == found.shape.as_list() else tf.ensure_shape(found, known)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (tf.Tensor, tf.Variable))  # excludes sparse and ragged tensors


def _described(value: Any) -> str:
    if _is_tensor(value):
        return f"a tensor of shape {value.shape}"
    many = isinstance(value, (tuple, list))
    return f"{len(value)} values" if many else f"a {type(value).__name__}"
