"""Compiled matrix products and dropout, compared with float64 and with TensorFlow."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.config import Config
from lm.data.batches import Rows
from lm.model.plain import matmul as product
from tests.unit.kernels.arrays import assert_near, numbers, products_of, run
from tests.unit.model.networks import context_of


def exact(x, bf16):
    """Return x in float64, first rounded to bfloat16 if bf16."""
    return (x.astype(tf.bfloat16.as_numpy_dtype) if bf16 else x).astype(np.float64)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("multiply", [kernels.matmul, product])
@pytest.mark.parametrize("M, K, N", [(1, 1, 1), (3, 5, 7), (40, 1100, 130), (100, 33, 501)])
def test_bfloat16_products_only_round_the_factors(M, K, N, multiply, bf16):
    a, b, dc = numbers(M, K), numbers(K, N), numbers(M, N)

    def fetch(a_ph, b_ph):
        c = multiply(a_ph, b_ph, "bfloat16" if bf16 else "float32")
        return c, tf.gradients(c, [a_ph, b_ph], dc)

    c, (da, db) = run(fetch, [a, b])
    a, b, dc = (exact(x, bf16) for x in (a, b, dc))
    assert_near(c, a @ b)
    assert_near(da, dc @ b.T)
    assert_near(db, a.T @ dc)


# Sizes around the sizes of vectors and tiles, and sums with several blocks.
SHAPES = [
    *itertools.product([1, 15, 17, 33], [1, 15, 31, 33], [1, 15, 17, 31, 33]),
    (30, 1025, 47),
    (33, 1500, 31),
    (1500, 17, 33),
    (31, 33, 1500),
    (65, 34, 160),
    (64, 2048, 64),
    (127, 1040, 300),  # few and many rows (gemm.h)
    (128, 1040, 300),
]


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_products_in_all_layouts(dtype, bf16, transpose_b):
    rounded = bf16 or dtype == tf.bfloat16
    with tf.Graph().as_default(), tf.Session() as session:
        a_ph, b_ph = (tf.placeholder(tf.float32, [None, None]) for _ in range(2))
        a_op, b_op = tf.cast(a_ph, dtype), tf.cast(b_ph, dtype)
        c_op = kernels.load().ops.lm_mat_mul(a_op, b_op, bf16=bf16, transpose_b=transpose_b)
        for M, K, N in SHAPES:
            a, b = numbers(M, K), numbers(K, N)
            c = session.run(c_op, {a_ph: a, b_ph: b.T if transpose_b else b})
            # The remaining differences are the rounding of float32 sums.
            assert_near(c, exact(a, rounded) @ exact(b, rounded))


@pytest.mark.parametrize("transpose_a, transpose_b", [(0, 0), (0, 1), (1, 0)])
def test_batched_products_equal_products_of_matrices(transpose_a, transpose_b):
    with tf.Graph().as_default(), tf.Session() as session:
        a_ph, b_ph = (tf.placeholder(tf.float32, [3, None, None]) for _ in range(2))
        c_op = kernels.rounded_product(a_ph, b_ph, bool(transpose_a), bool(transpose_b))
        for M, K, N in SHAPES[::7]:
            a, b = numbers(3, M, K), numbers(3, K, N)
            feed = {a_ph: a.swapaxes(1, 2) if transpose_a else a}
            feed[b_ph] = b.swapaxes(1, 2) if transpose_b else b
            assert_near(session.run(c_op, feed), exact(a, True) @ exact(b, True))


@pytest.mark.parametrize("bf16", [False, True])
def test_sums_with_exchanged_factors_have_the_same_bits(bf16):
    with tf.Graph().as_default(), tf.Session() as session:
        a, b = numbers(60, 130), numbers(60, 47)
        micro_batches = (2, 3, 2, 3)
        sums = [kernels.token_sum(*pair, bf16, micro_batches) for pair in ((a, b), (b, a))]
        one, other = session.run(sums)
    np.testing.assert_array_equal(one, other.T)


@pytest.mark.parametrize("bf16", [False, True])
def test_products_of_a_row_do_not_depend_on_other_rows(bf16):
    every = np.arange(101)
    whole = products_of(every, bf16, threads=2)
    for rows in every[:1], every[1:18], every[16:49], every[3:99:2], every[::-1]:
        for some, all_rows in zip(products_of(rows, bf16, threads=2), whole):
            np.testing.assert_array_equal(some, all_rows[rows])


@pytest.mark.parametrize("keep_prob", [0.35, 0.85])  # 1 / 0.85 depends on the rounding
@pytest.mark.parametrize("T, B, H", [(1, 1, 1), (3, 2, 7), (4, 3, 64), (5, 2, 203), (35, 2, 650)])
def test_dropout_and_its_gradient_are_bitwise_equal_to_tensorflow(T, B, H, keep_prob, monkeypatch):
    x, dy = numbers(T, B, H), numbers(T, B, H, seed=1)

    def fetch(x):
        context = context_of(Rows(7, B), Config(seed=2**33 + 1), 2**40 + 5, num_draws=3)
        y = context.dropout(tf.ensure_shape(x, [T, B, H]), keep_prob)
        return [y, tf.gradients(y, x, dy)[0]]

    own = run(fetch, [x])
    monkeypatch.setattr(kernels, "available", lambda: False)
    for mine, stock in zip(own, run(fetch, [x])):
        np.testing.assert_array_equal(mine, stock)
