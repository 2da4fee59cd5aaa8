"""Calls of a session that look up their fetches and feeds only once."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf.config_pb2 import CallableOptions


class _Call(NamedTuple):
    """A prepared call."""

    compute: Callable  # takes the values of the placeholders, and returns the values of the tensors
    tensors: Sequence[tf.Tensor]  # the fetched tensors that are not fed


class SessionCalls:
    """A replacement of `session.run`, which several threads may call at the same time.

    `session.run` looks up and checks all fetches and feeds in each call, which takes about 1 ms.
    The values of feeds are arrays or numbers, whose shapes are not checked.
    """

    def __init__(self, session: tf.Session):
        self._session, self._lock = session, threading.Lock()
        self._calls: dict[tuple, _Call] = {}  # for each set of fetches and placeholders

    def __call__(self, fetches: Any, feed: Mapping[tf.Tensor, Any]) -> Any:
        flat = tf.nest.flatten(fetches)
        key = tuple(flat), tuple(feed)
        with self._lock:
            if key not in self._calls:
                self._calls[key] = self._prepare(flat, feed)
        call = self._calls[key]
        values = {ph: np.asarray(value, ph.dtype.as_numpy_dtype) for ph, value in feed.items()}
        # Like `session.run`, this method adds the failed operation to an error.
        found = self._session._do_call(call.compute, *values.values())
        values.update(zip(call.tensors, found))
        return tf.nest.pack_sequence_as(fetches, [values.get(each) for each in flat])

    def _prepare(self, flat: Sequence[Any], feed: Mapping[tf.Tensor, Any]) -> _Call:
        assert all(isinstance(each, (tf.Tensor, tf.Operation)) for each in flat)
        tensors = [each for each in flat if isinstance(each, tf.Tensor) and each not in feed]
        options = CallableOptions(
            feed=[placeholder.name for placeholder in feed],
            fetch=[tensor.name for tensor in tensors],
            target=[each.name for each in flat if isinstance(each, tf.Operation)],
        )
        # Keras uses this method too. `session.make_callable` prepares only calls without feeds.
        return _Call(self._session._make_callable_from_options(options), tensors)
