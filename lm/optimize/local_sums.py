"""Sums over the windows of the local rows, each of which is a call of session.run.

The session holds the tensors of a window and their sums under a key (MapStage), so they are never
copied to NumPy. The key of a sum is the key of its first window.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from lm.optimize.sparse import Gradient, is_sparse

_Operator = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class LocalSums:
    """Tensors that are computed for each window of the local rows, and added up.

    Each step must use all sums, because a held tensor is not replaced by the next one. Every error
    in a step therefore ends the session.

    Attributes:
      of_window: The fetches of a window: its key, and the ops that hold its tensors.
    """

    def __init__(self, window_key: tf.Tensor):
        self._window_key, self._hold_ops, self._add_ops = window_key, [], []
        self.of_window = tf.identity(window_key), self._hold_ops
        self._first_ph, self._second_ph, self._sum_ph = (
            tf.placeholder(tf.int64, [], f"{name}_key") for name in ("first", "second", "sum")
        )

    def sum(self, tensor: Gradient) -> Gradient:
        """Return the sum of a tensor over the windows; a sparse gradient lists all their rows."""
        if not is_sparse(tensor):
            (total,) = self._sum([tensor], tf.add)
            total.set_shape(tensor.shape)
            return total
        values, indices = self._sum([tensor.values, tensor.indices], _concat)
        values.set_shape([None, *tensor.values.shape[1:]])
        indices.set_shape([None])
        return tf.IndexedSlices(values, indices, tensor.dense_shape)

    def _sum(self, tensors: Sequence[tf.Tensor], operator: _Operator) -> list[tf.Tensor]:
        name, dtypes = f"sum_{len(self._hold_ops)}", [tensor.dtype for tensor in tensors]
        indices = list(range(len(tensors)))

        def hold(key: tf.Tensor, values: Sequence[tf.Tensor]) -> tf.Operation:
            return tf.raw_ops.MapStage(
                key=key, indices=indices, values=values, dtypes=dtypes, shared_name=name
            )

        def take(key: tf.Tensor) -> list[tf.Tensor]:
            return tf.raw_ops.MapUnstage(key=key, indices=indices, dtypes=dtypes, shared_name=name)

        self._hold_ops.append(hold(self._window_key, tensors))
        pairs = zip(take(self._first_ph), take(self._second_ph))
        self._add_ops.append(hold(self._first_ph, [operator(*pair) for pair in pairs]))
        return take(self._sum_ph)

    def adder(self, run: Callable) -> Callable[[Any, Any], Any]:
        """Return a function that adds the sums of two neighbors, given their fetched values."""

        def add(first: Any, second: Any) -> Any:
            run(self._add_ops, {self._first_ph: first[0], self._second_ph: second[0]})
            return first

        return add

    def feed(self, total: Any) -> dict[tf.Tensor, Any]:
        """Return the feed of a call of session.run that uses the sums."""
        return {self._sum_ph: total[0]}


def _concat(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    return tf.concat([first, second], axis=0)
