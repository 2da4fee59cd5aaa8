"""Report errors of a user's network functions in one line, with the line of the user's file."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from lm.errors import ProgramExit, UserError, short_message
from lm.user.code import hint, place

PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}

_CAUSED_BY_OPERANDS = (
    tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError, tf.errors.UnimplementedError,
)  # fmt: skip
_STACK = "Traceback (most recent call last)"


def call(path: str, function: Callable, *arguments: Any) -> Any:
    """Call a function of a config file; if it fails, the error names the line of the file."""
    try:
        return function(*arguments)
    except ProgramExit as error:
        message, cause = str(error), error
    except (Exception, SystemExit) as error:
        message, cause = short_message(error) + hint(path, _frames(error), str(error)), error
        if "EagerTensor" in str(error):  # a constant, or a variable from tf.Variable
            message += "; create tensors inside the function, not at the top of the file"
        message += hint_for_words(*arguments)
    name = getattr(function, "__name__", "a function")
    raise UserError(f"{place(path, _frames(cause))}, in {name}: {message}") from cause


def hint_for_words(inputs: Any, *others: Any) -> str:
    """Return a hint if only the calls for single words, or with an unknown B, failed."""
    if not others or not isinstance(inputs, tf.Tensor) or inputs.shape.rank != 2:
        return ""
    steps, rows = inputs.shape.as_list()
    num_steps = others[-1].config.num_steps  # the last argument is the context
    is_single = steps == 1 != num_steps  # the calls for windows come first
    kind = f"for single words (T = 1, not num_steps = {num_steps})" if is_single else "for windows"
    if rows is None:
        return f"; this is the call {kind} and an unknown B (lm.export --rows sets B)"
    return f"; this is the call {kind}" if is_single else ""


@contextlib.contextmanager
def one_line_errors(path: str, running: bool = False) -> Iterator[None]:
    """Replace errors of a user-defined network by a UserError that names the config file.

    If the graph is running, only errors that are caused by the operands of an operation, or by the
    user's Python code, are attributed to the network.
    """
    try:
        yield
    except ProgramExit:
        raise
    except Exception as error:
        if running and not _is_of_network(error):
            raise
        frames = _frames(error)
        message = short_message(error) + hint(path, frames, str(error))
        raise UserError(f"{place(path, frames)}: {message}") from error


def _is_of_network(error: Exception) -> bool:
    if isinstance(error, _CAUSED_BY_OPERANDS):
        return True
    # Other errors may have other causes, such as a device failure. For an operation in a loop,
    # TensorFlow only reports the message. Only errors of Python code contain a Python stack.
    is_python = getattr(getattr(error, "op", None), "type", None) in PYTHON_OPS
    return is_python or (isinstance(error, tf.errors.OpError) and _STACK in error.message)


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the stack that created the failed operation, or the stack of the error."""
    op = getattr(error, "op", None)
    while getattr(op, "_original_op", None) is not None:  # an operation of a gradient
        op = op._original_op
    created_at = getattr(op, "traceback", None)
    rewritten = getattr(error, "ag_error_metadata", None)  # see short_message
    translated = reversed(rewritten.translated_stack) if rewritten else ()  # innermost first
    return [
        *(created_at or traceback.extract_tb(error.__traceback__)),
        *(traceback.FrameSummary(f.filename, f.lineno, f.function_name) for f in translated),
    ]
