"""Keras layers in a network function: their variables are those of `tf.get_variable`.

Each call of a function creates new layers, which find the variables of the previous call by name.
"""

import contextlib
import functools
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from lm.tf1.call import replaced


@contextlib.contextmanager
def shared_layers(create_variable: Callable) -> Iterator[None]:
    """Let layers create variables with a function, and count the layers of this call only."""
    if not importlib.util.find_spec("tf_keras"):
        yield
        return
    from tf_keras.src import backend
    from tf_keras.src.engine import base_layer_utils

    def make_variable(
        name: str,
        shape: Any = None,
        dtype: Any = tf.float32,
        initializer: Any = None,
        trainable: bool | None = True,
        **options: Any,
    ) -> tf.Variable:
        kind = initializer() if isinstance(initializer, type) else initializer
        initial_value = functools.partial(kind, shape, dtype=dtype)
        return create_variable(initial_value, trainable, name=name, dtype=dtype)

    counts = {"PER_GRAPH_OBJECT_NAME_UIDS": weakref.WeakKeyDictionary()}
    with (
        replaced(backend, counts),
        replaced(base_layer_utils, {"make_variable": make_variable}),
    ):
        yield
