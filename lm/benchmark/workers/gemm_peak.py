"""The fastest matrix product that TensorFlow reaches in this process."""

from __future__ import annotations

import time

import tensorflow.compat.v1 as tf


def gemm_peak(size: int, count: int, precision: str, session_config: tf.ConfigProto) -> float:
    """Multiply two square matrices, large enough to be limited by arithmetic alone.

    Args:
      size: Rows and columns.
      count: Products to take the fastest of.
      precision: "float32" or "bfloat16".
      session_config: Threads and device.

    Returns:
      The operations per second.
    """
    with tf.Graph().as_default(), tf.Session(config=session_config) as session:
        # Variables, because a product of constants would be computed once and kept.
        a, b = (
            tf.get_variable(name, initializer=tf.cast(tf.random.uniform([size, size]), precision))
            for name in "ab"
        )
        # The operation, not its result: 16 MB need not be copied out.
        product_op = tf.matmul(a, b).op
        session.run(tf.global_variables_initializer())
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            session.run(product_op)
            seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
