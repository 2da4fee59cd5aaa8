"""Matrix products in the precision of the config."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

PRECISIONS = ("float32", "bfloat16")


def product(
    a: tf.Tensor, b: tf.Tensor, precision: str, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """Multiply two float32 matrices.

    Args:
      a: Left factor.
      b: Right factor.
      precision: float32, or bfloat16, which rounds both factors to bfloat16 and adds up in
        float32.
      transpose_a: Whether to transpose a first.
      transpose_b: Whether to transpose b first.

    Returns:
      The float32 product.
    """
    if precision == "bfloat16":
        a, b = tf.cast(a, tf.bfloat16), tf.cast(b, tf.bfloat16)
    result = tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    return tf.cast(result, tf.float32)
