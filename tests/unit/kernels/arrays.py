"""Inputs of the compiled ops, and comparisons of their results."""

import numpy as np
import tensorflow.compat.v1 as tf

from lm import kernels

# The error of products whose factors are rounded to bfloat16 (8 bits), relative to exact products.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(np.float32)


def run(fetch, feeds=(), threads=2):
    """Run fetch(*placeholders) in a new graph. Feeding prevents constant folding."""
    with tf.Graph().as_default():
        placeholders = [tf.placeholder(np.asarray(x).dtype, np.shape(x)) for x in feeds]
        config = tf.ConfigProto(intra_op_parallelism_threads=threads)
        with tf.Session(config=config) as session:
            return session.run(fetch(*placeholders), dict(zip(placeholders, feeds)))


def assert_near(actual, expected, precision="float32"):
    expected = np.asarray(expected)
    assert np.shape(actual) == expected.shape
    scale = max(np.abs(expected).max(initial=0), 1e-3)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[precision] * scale)


def lstm_inputs(T, B, H):
    weights = numbers(H, 4 * H) * H**-0.5
    bias, h0, c0 = numbers(4 * H, seed=4), numbers(B, H, seed=1), numbers(B, H, seed=2)
    return [numbers(T, B, 4 * H), bias, weights, h0, c0]


def lstm_loss(outputs):
    """Return a scalar that depends on each element of all outputs."""
    factors = [numbers(*output.shape.as_list(), seed=3 + n) for n, output in enumerate(outputs)]
    return tf.add_n([tf.reduce_sum(output * factor) for output, factor in zip(outputs, factors)])


def softmax_inputs(N, H, V):
    targets = np.random.default_rng(V).integers(V, size=N)
    scale = np.abs(numbers(N, seed=5)) + 0.1
    return [numbers(N, H), numbers(H, V) * 3, numbers(V)], targets, scale


def products_of(rows, bf16, threads):
    """Return products of some rows. Threads divide `wide` by columns and `narrow` by rows."""

    def products(a, wide, narrow):
        a = tf.gather(a, rows)
        return [
            kernels.load().ops.lm_mat_mul(a, b, bf16=bf16, transpose_b=transpose_b)
            for b in (wide, narrow)
            for transpose_b, b in ((False, b), (True, tf.transpose(b)))
        ]

    return run(products, [numbers(101, 1237), numbers(1237, 530), numbers(1237, 17)], threads)
