"""Matrix products in the precision of the config."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

PRECISIONS = ("float32", "bfloat16")


def product(
    a: tf.Tensor, b: tf.Tensor, precision: str, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """Multiply two float32 matrices. Differentiable, with products of the same precision.

    No stock product of bfloat16 tensors would do: its result is rounded, too. In float32 the
    product of two rounded factors is exact, also in the TF32 that GPUs multiply float32 in.

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
        a, b = _rounded_factor(a), _rounded_factor(b)
    result = tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    return _rounded_gradient(result) if precision == "bfloat16" else result


def _to_bfloat16(x):
    """The float32 values nearest to x that bfloat16 has, ties to even."""
    return tf.cast(tf.cast(x, tf.bfloat16), tf.float32)


@tf.custom_gradient
def _rounded_factor(x):
    return _to_bfloat16(x), lambda dx: dx  # the gradient is a sum, and stays float32


@tf.custom_gradient
def _rounded_gradient(x):
    return tf.identity(x), _to_bfloat16  # it is a factor of the products that follow
