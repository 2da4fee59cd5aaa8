"""The fastest matrix product that TensorFlow reaches in this process."""

from __future__ import annotations

import time

import tensorflow.compat.v1 as tf


class GemmPeak:
    """Multiplies two square matrices, large enough to be limited by arithmetic alone.

    Args:
      size: Rows and columns.
      precision: "float32" or "bfloat16".
      session_config: Threads and device.
    """

    def __init__(self, size: int, precision: str, session_config: tf.ConfigProto):
        self._flops = 2 * size**3
        with tf.Graph().as_default():
            # Variables, because a product of constants would be computed once and kept.
            a, b = (
                tf.get_variable(
                    name, initializer=tf.cast(tf.random.uniform([size, size]), precision)
                )
                for name in "ab"
            )
            # The operation, not its result: 16 MB need not be copied out.
            self._product_op = tf.matmul(a, b).op
            self._session = tf.Session(config=session_config)
            self._session.run(tf.global_variables_initializer())

    def measure(self, count: int) -> float:
        """Return the operations per second of the fastest of `count` products."""
        fastest = float("inf")
        for _ in range(count):
            start = time.perf_counter()
            self._session.run(self._product_op)
            fastest = min(fastest, time.perf_counter() - start)
        return self._flops / fastest
