"""The file or the directory of an export, which appears only when it is complete."""

import contextlib
import os
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from lm.errors import RunError, UserError, error_class, short_message
from lm.files import temporary_directory


@contextlib.contextmanager
def new_export(to: str) -> Iterator[str]:
    """Yield a path to write a file or a directory to, and rename it to `to` at the end."""
    if os.path.exists(to):
        raise UserError(f"--to {to} already exists: choose a different path, or remove it")
    parent = os.path.dirname(os.path.abspath(to))
    try:
        os.makedirs(parent, exist_ok=True)
        with temporary_directory(parent, ".export-") as staging:
            path = os.path.join(staging, "export")
            yield path
            os.rename(path, to)
    except OSError as error:
        raise error_class(error)(f"cannot write {to}: {error.strerror}") from error
    except tf.errors.OpError as error:
        raise RunError(f"cannot write {to}: {short_message(error)}") from error
