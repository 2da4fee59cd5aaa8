"""Products of user-defined networks in bfloat16, compared with float64."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.user.rounding import products_in
from tests.unit.kernels.arrays import assert_near, numbers, run


def in_loop(a, b):
    return tf.while_loop(lambda i, _: i < 1, lambda i, _: (i + 1, tf.matmul(a, b)), (0, a @ b))[1]


def in_function(a, b):
    return tf.function(tf.matmul)(a, b)


PRODUCTS = {  # by the equation that NumPy computes
    "ij,jk->ik": [
        tf.matmul, in_loop, in_function,
        lambda a, b: tf.matmul(a, tf.transpose(b), transpose_b=True),
        lambda a, b: tf.matmul(tf.transpose(a), b, transpose_a=True),
        lambda a, b: tf.transpose(tf.matmul(b, a, transpose_a=True, transpose_b=True)),
    ],
    "aij,ajk->aik": [
        tf.matmul,
        lambda a, b: tf.matmul(a, tf.transpose(b, [0, 2, 1]), transpose_b=True),
        lambda a, b: tf.matmul(tf.transpose(a, [0, 2, 1]), b, transpose_a=True),
        lambda a, b: tf.transpose(tf.matmul(b, a, transpose_a=True, transpose_b=True), [0, 2, 1]),
        lambda a, b: tf.einsum("tbx,txy->tby", a, b),
    ],
    "abij,abjk->abik": [tf.matmul],
    "aij,jk->aik": [lambda a, b: tf.matmul(a, b[None])],  # the second factor is repeated
    "baci,bdai->dabc": [lambda a, b: tf.einsum("baci,bdai->dabc", a, b)],
    "bij,jk->bik": [lambda a, b: tf.tensordot(a, b, 1), lambda a, b: tf.einsum("bij,jk", a, b)],
    "nhwc,hwcd->nd": [lambda a, b: tf.nn.conv2d(a, b, 1, "VALID")[:, 0, 0]],
}  # fmt: skip
SIZES = {**dict.fromkeys("abihwn", 3), "j": 40, "c": 5, "k": 17, "d": 7}


@pytest.mark.parametrize(
    "equation, multiply", [(equation, f) for equation, all in PRODUCTS.items() for f in all]
)
def test_results_and_gradients_round_only_the_factors(equation, multiply):
    *inputs, result = equation.replace("->", ",").split(",")
    a, b, dc = (numbers(*map(SIZES.get, x), seed=n) for n, x in enumerate([*inputs, result]))

    def fetch(a_ph, b_ph):
        with products_in("bfloat16"):
            c = multiply(a_ph, b_ph)
        return c, tf.gradients(c, [a_ph, b_ph], dc)

    def exact(output, x, y):
        x, y = ((values.astype(tf.bfloat16.as_numpy_dtype), name) for values, name in (x, y))
        factors = [values.astype(np.float64) for values, _ in (x, y)]
        return np.einsum(f"{x[1]},{y[1]}->{output}", *factors)

    c, (da, db) = run(fetch, [a, b])
    a, b, dc = zip((a, b, dc), (*inputs, result))
    assert_near(c, exact(result, a, b))
    assert_near(da, exact(inputs[0], dc, b))
    assert_near(db, exact(inputs[1], a, dc))


def test_only_products_in_the_context_are_rounded():
    a, b = numbers(3, 40), numbers(40, 17)
    with products_in("bfloat16"):
        pass
    assert_near(run(tf.matmul, [a, b]), a.astype(np.float64) @ b)
