"""Mistakes in a config file's network, each told in one line."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional

import tensorflow.compat.v1 as tf

from lm.config_file import NetworkFunctions, keras_hint, place
from lm.errors import ProgramExit, UserError
from lm.model.rules import PYTHON_OPS

_MOST_CHARACTERS = 300  # of a message: TensorFlow's go on with the whole graph
_OF_OPERANDS = (
    tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError, tf.errors.UnimplementedError,
)  # fmt: skip
_STACK = "Traceback (most recent call last)"
_NAME = re.compile(r"[A-Za-z0-9.][\w./-]*", re.ASCII)  # as TensorFlow names variables


def call(path: str, function: Callable, *arguments: Any) -> Any:
    """Call a function of a config file.

    Args:
      path: Of the file.
      function: What to call.
      *arguments: Its arguments.

    Raises:
      UserError: It fails; the message tells the line of the file.
    """
    try:
        return function(*arguments)
    except ProgramExit as error:
        raise UserError(f"{_place(path, function, error)}: {error}") from error
    except Exception as error:
        message = message_of(error) + keras_hint(error)
        if "EagerTensor" in str(error):  # of a constant or a variable of tf.Variable
            message += "; make in the function what is made at the top of the file"
        raise UserError(f"{_place(path, function, error)}: {message}") from error


@contextlib.contextmanager
def one_line(functions: NetworkFunctions, runs: bool = False) -> Iterator[None]:
    """Tell in one line what fails where a graph with a config file's network is built or run.

    Args:
      functions: The functions of the network; for the built-in ones, nothing changes.
      runs: Whether the graph is run: only failures of what operations are given, and of the
        file's Python, are then its own.

    Raises:
      UserError: In the place of a failure; the message tells the file.
    """
    try:
        yield
    except ProgramExit:
        raise
    except Exception as error:
        if functions.is_built_in or (runs and not _is_of_file(error)):
            raise
        raise UserError(f"{_line(functions.where, error)}: {message_of(error)}") from error


def _is_of_file(error: Exception) -> bool:
    if isinstance(error, _OF_OPERANDS):
        return True
    # Not all that its operations raise: a device that fails may do so for a moment. Of a loop's
    # operation TensorFlow tells the message alone, in which no other one has Python's stack.
    is_python = getattr(getattr(error, "op", None), "type", None) in PYTHON_OPS
    return is_python or (isinstance(error, tf.errors.OpError) and _STACK in error.message)


def message_of(error: Exception) -> str:
    """Return the kind of an error, and the one line of its message that says what has failed."""
    told = getattr(error, "ag_error_metadata", None)
    if told:  # of Python that TensorFlow has rewritten: the message begins with its stack
        return told.cause_message.partition("\n")[0][:_MOST_CHARACTERS]
    # Of an operation: where it was made, then what it says, then its node. Others go on and on.
    text = str(error).partition("\n\t [[")[0]
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    line = lines[-1 if isinstance(error, tf.errors.OpError) else 0]
    return f"{type(error).__name__}: {line[:_MOST_CHARACTERS]}"


def _place(path: str, function: Callable, error: BaseException) -> str:
    return f"{_line(path, error)}, in {getattr(function, '__name__', 'a function')}"


def _line(path: str, error: BaseException) -> str:
    """Return the file, and its line that failed or that made the operation that did."""
    made = getattr(getattr(error, "op", None), "traceback", ())
    told = getattr(error, "ag_error_metadata", None)  # see message_of
    traced = reversed(told.translated_stack) if told else ()  # innermost first
    return place(path, [*made, *traceback.extract_tb(error.__traceback__), *traced])


def checked_shapes(path: str, found: Any) -> dict[str, list[int]]:
    """Return what `state_shapes` has returned.

    Raises:
      UserError: It is no dictionary from names to lists of sizes.
    """
    where = f"{path}: state_shapes must return names with lists of sizes, such as {{'h': [200]}}"
    if not isinstance(found, Mapping):
        raise UserError(f"{where}, not {found!r}")
    for name, shape in found.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise UserError(f"{where}; {name!r} cannot be a name")
        if not isinstance(shape, (list, tuple)) or not all(
            type(size) is int and size > 0 for size in shape
        ):
            raise UserError(f"{where}; the shape of {name!r} is {shape!r}")
    return {name: list(shape) for name, shape in found.items()}


def checked_result(
    where: str,
    found: Any,
    what: str,
    shape: Sequence[Optional[int]],
    state_shapes: Mapping[str, Sequence[int]],
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Return what `build_outputs` or `build_logits` has returned, of known shapes.

    Args:
      where: The file and the function.
      found: What was returned.
      what: "outputs" or "logits".
      shape: Their shape; None where it may be anything that is known, or B is not known.
      state_shapes: Of the state.

    Raises:
      UserError: It is something else: what, what was expected, what was found. (Where that is not
        known yet, the operation that has the shape checked fails.)
    """
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise UserError(f"{where} must return ({what}, new_state), not {_shown(found)}")
    top, state = found
    top = _checked_tensor(where, what, top, shape)
    if top.shape.as_list()[-1] is None:
        raise UserError(f"{where}: the last axis of {what} must be of a known size")
    if not isinstance(state, Mapping):
        raise UserError(f"{where}: new_state must be a dictionary, not {_shown(state)}")
    expected, names = sorted(state_shapes), sorted(map(str, state))
    if names != expected:
        raise UserError(f"{where}: new_state has {names}, but state_shapes has {expected}")
    return top, {
        name: _checked_tensor(where, f"new_state[{name!r}]", part, [shape[1], *state_shapes[name]])
        for name, part in state.items()
    }


def _checked_tensor(where: str, what: str, found: Any, shape: Sequence[Optional[int]]) -> tf.Tensor:
    if not _is_tensor(found):
        raise UserError(f"{where}: {what} must be a tensor, not {_shown(found)}")
    if found.dtype.base_dtype != tf.float32:
        raise UserError(f"{where}: {what} must be float32, not {found.dtype.base_dtype.name}")
    if not found.shape.is_compatible_with(shape):
        raise UserError(f"{where}: {what} must have the shape {_text(shape)}, not {found.shape}")
    if found.shape.rank is None:
        raise UserError(f"{where}: {what} must have the shape {_text(shape)}, not an unknown one")
    known = found.shape.merge_with(shape)
    # An operation that checks each value, where only values tell.
    return found if known.as_list() == found.shape.as_list() else tf.ensure_shape(found, known)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (tf.Tensor, tf.Variable))  # not a sparse or a ragged one


def _text(shape: Sequence[Optional[int]]) -> str:
    return f"({', '.join('any' if size is None else str(size) for size in shape)})"


def _shown(value: Any) -> str:
    if _is_tensor(value):
        return f"a tensor of shape {value.shape}"
    many = isinstance(value, (tuple, list))
    return f"{len(value)} values" if many else f"a {type(value).__name__}"
