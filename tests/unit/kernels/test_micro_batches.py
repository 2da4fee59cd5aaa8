"""The same bits however the rows of a batch are spread over ranks: with ==, on every CPU."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from tests.unit.kernels.test_kernels import library, numbers, run  # noqa: F401

SHARES = 8


def deal(rows):
    """The rows of each share of a batch."""
    return [rows * (s + 1) // SHARES - rows * s // SHARES for s in range(SHARES)]


def tree(sums):
    """What the exchange makes of the ranks' sums."""
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
    return sums[0]


def on_ranks(num_ranks, fetch, tensors_TB):
    """Return what fetch(shares, *tensors) makes of each rank's shares and rows."""
    shares = deal(tensors_TB[0].shape[1])
    outputs, first = [], 0
    for rank in range(num_ranks):
        own = shares[rank * SHARES // num_ranks : (rank + 1) * SHARES // num_ranks]
        outputs.append(fetch(own, *(x[:, first : first + sum(own)] for x in tensors_TB)))
        first += sum(own)
    return outputs


def tokens(x_TB):
    return tf.reshape(x_TB, [-1, x_TB.shape[2]])


# Uneven shares, empty shares, a row each; sums of less than a vector's or tile's depth, of many.
BATCHES = [(1, 1), (2, 3), (1, 8), (3, 20), (16, 8), (5, 13), (35, 20), (70, 61)]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("b_type", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("T, B", BATCHES)
def test_sums_over_tokens_of_ranks_are_those_of_one(T, B, b_type, bf16):
    a, b = numbers(T, B, 37), numbers(T, B, 83)

    def sums(shares, a, b):
        product = kernels._token_sum(tokens(a), tf.cast(tokens(b), b_type), bf16, shares)
        return product, kernels.column_sums(tokens(b), shares)

    def fetch(*placeholders):
        return [on_ranks(num_ranks, sums, placeholders) for num_ranks in (1, 2, 4, 8)]

    (whole,), *spread = run(fetch, [a, b])
    for ranks in spread:
        for one, *many in zip(whole, *ranks):
            np.testing.assert_array_equal(one, tree(many))
    assert np.abs(whole[1] - b.sum(axis=(0, 1))).max() < 1e-4 * (T * B) ** 0.5
    exact = a.reshape(-1, 37).T.astype(np.float64) @ b.reshape(-1, 83)
    assert (
        np.abs(whole[0] - exact).max()
        < (2e-2 if bf16 or b_type != tf.float32 else 1e-5) * (T * B) ** 0.5
    )


def test_column_sums_are_the_tree():
    x = numbers(3, 20, 5)
    (sums,) = run(lambda x: [kernels.column_sums(tokens(x), deal(20))], [x])
    of_shares, first = [], 0
    for rows in deal(20):
        each = np.zeros(5, np.float32)
        for row in x[:, first : first + rows].reshape(-1, 5):
            each = each + row
        of_shares.append(each)
        first += rows
    np.testing.assert_array_equal(sums, tree(of_shares))


@pytest.mark.parametrize("shares", [[3], [1, 1, 1], [2, 3, 2], [1] * 5, [0, 7, 1, 0, 2]])
@pytest.mark.parametrize("bf16", [False, True])
def test_any_number_of_shares_is_a_sum(shares, bf16):
    a, b = numbers(4, sum(shares), 5), numbers(4, sum(shares), 33)
    (product,) = run(lambda a, b: [kernels._token_sum(tokens(a), tokens(b), bf16, shares)], [a, b])
    expected = a.reshape(-1, 5).T @ b.reshape(-1, 33)
    np.testing.assert_allclose(product, expected, rtol=0, atol=5e-2 if bf16 else 1e-5)


@pytest.mark.parametrize("shares", [[3, 2], [-1, 4], [0], [0] * 300])
def test_shares_that_cannot_be(shares):
    with pytest.raises(tf.errors.InvalidArgumentError, match="share"):
        run(lambda x: [kernels.column_sums(x, shares)], [numbers(6, 2)])


# Recurrent weights within a core's cache, whose rows threads divide, and beyond it; a row a rank.
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("T, B, H", [(3, 20, 24), (4, 8, 33), (2, 21, 330), (2, 4, 40)])
def test_step_of_ranks_is_that_of_one(T, B, H, precision):
    """Loss and gradients are the tree of the ranks', what belongs to a row is the same."""
    V = 211
    words = np.random.default_rng(0).integers(V, size=(T, B, 1))

    def step(shares, x, words, h0, c0):
        weights = [
            tf.constant(numbers(*shape) * H**-0.5)
            for shape in ([H, 4 * H], [4 * H], [H, 4 * H], [H, V], [V])
        ]
        w_input, bias, w_recurrent, w_softmax, b_softmax = weights
        projected = kernels.matmul(tokens(x), w_input, precision, shares)
        projected = kernels.add_bias(projected, bias, shares)
        h, _, c_last = kernels.lstm_recurrence(
            tf.reshape(projected, [T, -1, 4 * H]), w_recurrent, h0[0], c0[0], precision, shares
        )
        loss, nll = kernels.softmax_cross_entropy(
            tokens(h),
            w_softmax,
            b_softmax,
            tf.reshape(words, [-1]),
            tf.fill([T * sum(shares)], 1 / B),
            precision,
            shares=shares,
        )
        sums = [loss, *tf.gradients(loss, weights)]
        of_rows = [h, c_last[None], tf.reshape(nll, [T, -1]), tf.gradients(loss, x)[0]]
        return sums, of_rows

    inputs = [numbers(T, B, H), words, numbers(1, B, H, seed=1), numbers(1, B, H, seed=2)]
    # Two shares a rank: a tree within a rank, and one over the ranks.
    whole, *spread = run(lambda *p: [on_ranks(num_ranks, step, p) for num_ranks in (1, 4)], inputs)
    sums, of_rows = whole[0]
    for ranks in spread:
        for one, *many in zip(sums, *(rank[0] for rank in ranks)):
            np.testing.assert_array_equal(one, tree(many))
        for one, *many in zip(of_rows, *(rank[1] for rank in ranks)):
            np.testing.assert_array_equal(one, np.concatenate(many, axis=1))
