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
from lm.tf1.inert import no_train_op


@contextlib.contextmanager
def shared_layers(create_variable: Callable, is_training: bool) -> Iterator[None]:
    """Let layers create variables with a function, and count the layers of this call only.

    Layers without `training` in their call use the argument, as in `fit` of a Keras model. Updates
    of layers, such as moving averages, are added to UPDATE_OPS. The variational dropout of cells
    applies only in training.
    """
    if not importlib.util.find_spec("tf_keras"):
        yield
        return
    from tf_keras.src import backend
    from tf_keras.src.engine import base_layer_utils, training, training_v1
    from tf_keras.src.engine.base_layer_v1 import Layer
    from tf_keras.src.layers.rnn.legacy_cell_wrappers import DropoutWrapper

    def make_variable(
        name: str,
        shape: Any = None,
        dtype: Any = tf.float32,
        initializer: Any = None,
        trainable: bool | None = True,
        constraint: Any = None,
        **options: Any,
    ) -> tf.Variable:
        kind = initializer() if isinstance(initializer, type) else initializer
        initial_value = functools.partial(kind, shape, dtype=dtype)
        return create_variable(
            initial_value, trainable, name=name, dtype=dtype, constraint=constraint
        )

    def add_update(layer: Any, updates: Any) -> None:
        num_updates = len(layer._updates)
        keep_update(layer, updates)
        for update in layer._updates[num_updates:]:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)

    keep_update = Layer.add_update
    no_dropout = {"_variational_recurrent_dropout_value": lambda cell, index, x, *others: x}
    counts = {"PER_GRAPH_OBJECT_NAME_UIDS": weakref.WeakKeyDictionary()}
    with (
        replaced(backend, counts),
        replaced(base_layer_utils, {"make_variable": make_variable}),
        replaced(Layer, {"add_update": add_update}),
        replaced(DropoutWrapper, {} if is_training else no_dropout),
        replaced(training.Model, {"compile": no_train_op}),
        replaced(training_v1.Model, {"compile": no_train_op}),
        backend.deprecated_internal_learning_phase_scope(int(is_training)),
    ):
        yield
