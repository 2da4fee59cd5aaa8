"""Calls of a session that look up their fetches and feeds only once."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf.config_pb2 import CallableOptions


class SessionCalls:
    """A replacement of `session.run`, which several threads may call at the same time.

    `session.run` looks up and checks all fetches and feeds in each call, which takes about 1 ms.
    The values of feeds are arrays or numbers, whose shapes are not checked.
    """

    def __init__(self, session: tf.Session):
        self._session, self._lock = session, threading.Lock()
        # For each set of fetches and placeholders: a function that takes the values of the
        # placeholders, and the tensors whose values it returns.
        self._calls: dict[tuple, tuple[Callable, Sequence[tf.Tensor]]] = {}

    def __call__(self, fetches: Any, feed: Mapping[tf.Tensor, Any]) -> Any:
        flat = tf.nest.flatten(fetches)
        key = tuple(flat), tuple(feed)
        with self._lock:
            if key not in self._calls:
                self._calls[key] = self._prepare(flat, feed)
        compute, tensors = self._calls[key]
        values = {ph: np.asarray(value, ph.dtype.as_numpy_dtype) for ph, value in feed.items()}
        # Like `session.run`, this method adds the failed operation to an error.
        found = self._session._do_call(compute, *values.values())
        values.update(zip(tensors, found))
        return tf.nest.pack_sequence_as(fetches, [values.get(each) for each in flat])

    def _prepare(
        self, flat: Sequence[Any], feed: Mapping[tf.Tensor, Any]
    ) -> tuple[Callable, Sequence[tf.Tensor]]:
        assert all(isinstance(each, (tf.Tensor, tf.Operation)) for each in flat)
        tensors = [each for each in flat if isinstance(each, tf.Tensor) and each not in feed]
        options = CallableOptions(
            feed=[placeholder.name for placeholder in feed],
            fetch=[tensor.name for tensor in tensors],
            target=[each.name for each in flat if isinstance(each, tf.Operation)],
        )
        # Keras uses this method too. `session.make_callable` prepares only calls without feeds.
        return self._session._make_callable_from_options(options), tensors
