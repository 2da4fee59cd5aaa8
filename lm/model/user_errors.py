"""Report errors of a user's network functions in one line, with the line of the config file."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from lm.config_file import NetworkFunctions, keras_hint, place
from lm.errors import ProgramExit, UserError

PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}

_MAX_CHARACTERS = 300  # per message; some messages of TensorFlow continue with the whole graph
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
    except Exception as error:
        message, cause = short_message(error) + keras_hint(error), error
        if "EagerTensor" in str(error):  # a constant, or a variable from tf.Variable
            message += "; create tensors inside the function, not at the top of the file"
    name = getattr(function, "__name__", "a function")
    raise UserError(f"{_place(path, cause)}, in {name}: {message}") from cause


@contextlib.contextmanager
def one_line_errors(functions: NetworkFunctions, running: bool = False) -> Iterator[None]:
    """Replace errors of a user-defined network by a UserError that names the config file.

    If the graph is running, only errors that are caused by the operands of an operation, or by the
    user's Python code, are attributed to the network.
    """
    try:
        yield
    except ProgramExit:
        raise
    except Exception as error:
        if functions.is_built_in or (running and not _is_of_network(error)):
            raise
        raise UserError(f"{_place(functions.where, error)}: {short_message(error)}") from error


def _is_of_network(error: Exception) -> bool:
    if isinstance(error, _CAUSED_BY_OPERANDS):
        return True
    # Other errors may have other causes, such as a device failure. For an operation in a loop,
    # TensorFlow only reports the message. Only errors of Python code contain a Python stack.
    is_python = getattr(getattr(error, "op", None), "type", None) in PYTHON_OPS
    return is_python or (isinstance(error, tf.errors.OpError) and _STACK in error.message)


def short_message(error: Exception) -> str:
    """Return the class of an error, and the line of its message that states the problem."""
    rewritten = getattr(error, "ag_error_metadata", None)
    if rewritten:  # TensorFlow rewrote the Python code: the message begins with a stack
        return rewritten.cause_message.partition("\n")[0][:_MAX_CHARACTERS]
    # The message of an operation ends with the problem, followed by the node.
    text = str(error).partition("\n\t [[")[0]
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    line = lines[-1 if isinstance(error, tf.errors.OpError) else 0]
    return f"{type(error).__name__}: {line[:_MAX_CHARACTERS]}"


def _place(path: str, error: BaseException) -> str:
    """Return the file, and its line that failed or that created the failed operation."""
    created_at = getattr(getattr(error, "op", None), "traceback", ())
    rewritten = getattr(error, "ag_error_metadata", None)  # see short_message
    translated = reversed(rewritten.translated_stack) if rewritten else ()  # innermost first
    return place(path, [*created_at, *traceback.extract_tb(error.__traceback__), *translated])
