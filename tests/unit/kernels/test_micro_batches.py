"""Sums over micro-batches are bitwise identical on any number of ranks."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from tests.unit.kernels.arrays import numbers, run

COUNT = 8


def deal(rows):
    """Return the rows of each micro-batch of a batch."""
    return [rows * (s + 1) // COUNT - rows * s // COUNT for s in range(COUNT)]


def tree(sums):
    """Add the sums of the ranks as the gradient exchange does."""
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
    return sums[0]


def on_ranks(num_ranks, fetch, tensors_TB):
    """Return the results of fetch(micro_batches, *tensors) for the rows of each rank."""
    micro_batches = deal(tensors_TB[0].shape[1])
    outputs, first = [], 0
    for rank in range(num_ranks):
        own = micro_batches[rank * COUNT // num_ranks : (rank + 1) * COUNT // num_ranks]
        outputs.append(fetch(own, *(x[:, first : first + sum(own)] for x in tensors_TB)))
        first += sum(own)
    return outputs


def tokens(x_TB):
    return tf.reshape(x_TB, [-1, x_TB.shape[2]])


# Uneven and empty micro-batches, one row each, and sums shorter and longer than a vector or tile.
BATCHES = [(1, 1), (2, 3), (1, 8), (3, 20), (16, 8), (5, 13), (35, 20), (70, 61)]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("b_type", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("T, B", BATCHES)
def test_token_sums_do_not_depend_on_the_number_of_ranks(T, B, b_type, bf16):
    a, b = numbers(T, B, 37), numbers(T, B, 83)

    def sums(micro_batches, a, b):
        product = kernels.token_sum(tokens(a), tf.cast(tokens(b), b_type), bf16, micro_batches)
        return product, kernels.column_sums(tokens(b), micro_batches)

    def fetch(*placeholders):
        return [on_ranks(num_ranks, sums, placeholders) for num_ranks in (1, 2, 4, 8)]

    (whole,), *spread = run(fetch, [a, b])
    for ranks in spread:
        for one, *many in zip(whole, *ranks):
            np.testing.assert_array_equal(one, tree(many))
    assert np.abs(whole[1] - b.sum(axis=(0, 1))).max() < 1e-4 * (T * B) ** 0.5
    exact = a.reshape(-1, 37).T.astype(np.float64) @ b.reshape(-1, 83)
    tolerance = 2e-2 if bf16 or b_type != tf.float32 else 1e-5
    assert np.abs(whole[0] - exact).max() < tolerance * (T * B) ** 0.5


def test_column_sums_add_the_micro_batches_as_a_tree():
    x = numbers(3, 20, 5)
    (sums,) = run(lambda x: [kernels.column_sums(tokens(x), deal(20))], [x])
    sums_of_each, first = [], 0
    for rows in deal(20):
        each = np.zeros(5, np.float32)
        for row in x[:, first : first + rows].reshape(-1, 5):
            each = each + row
        sums_of_each.append(each)
        first += rows
    np.testing.assert_array_equal(sums, tree(sums_of_each))


@pytest.mark.parametrize(
    "micro_batches",
    [[3], [1, 1, 1], [2, 3, 2], [1] * 5, [0, 7, 1, 0, 2], [0] * 250 + [1] * 6],  # 256 at most
)
@pytest.mark.parametrize("bf16", [False, True])
def test_any_number_of_micro_batches_can_be_summed(micro_batches, bf16):
    a, b = numbers(4, sum(micro_batches), 5), numbers(4, sum(micro_batches), 33)
    ends = 4 * np.cumsum(micro_batches)

    def products(a, b):
        factors = tokens(a), tokens(b), bf16
        by_rows = kernels.token_sum(*factors, micro_batches)
        return by_rows, kernels.token_sum(*factors, (), tf.constant(ends))

    expected = a.reshape(-1, 5).T @ b.reshape(-1, 33)
    for product in run(products, [a, b]):
        np.testing.assert_allclose(product, expected, rtol=0, atol=5e-2 if bf16 else 1e-5)


@pytest.mark.parametrize("micro_batches", [[3, 2], [-1, 4], [0], [6] + [0] * 256])
def test_invalid_micro_batches_are_an_error(micro_batches):
    with pytest.raises(tf.errors.InvalidArgumentError, match="micro-batch"):
        run(lambda x: [kernels.column_sums(x, micro_batches)], [numbers(6, 2)])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 70, 1, 0, 0, 9, 2], [0] * 7 + [5], [0] * 8])
def test_tokens_ordered_by_micro_batch_can_be_summed(counts, bf16):
    a, b = numbers(sum(counts), 37), numbers(sum(counts), 83)
    ends = np.cumsum(counts)

    def sums(a, b, num_ranks):
        for own in np.split(np.arange(COUNT), num_ranks):
            first = ends[own[0]] - counts[own[0]]
            part = slice(first, ends[own[-1]])
            own_ends = tf.constant(ends[own] - first)
            yield kernels.token_sum(a[part], b[part], bf16, (), own_ends)

    whole, *spread = run(lambda a, b: [list(sums(a, b, n)) for n in (1, 2, 4, 8)], [a, b])
    for ranks in spread:
        np.testing.assert_array_equal(whole[0], tree(ranks))
    np.testing.assert_allclose(whole[0], a.T @ b, atol=5e-2 if bf16 else 1e-5)


@pytest.mark.parametrize("ends", [[3], [4, 6, 5], [5, 7], [[6]], [-1, 6], [6] * 257])
def test_invalid_ends_of_micro_batches_are_an_error(ends):
    with pytest.raises(tf.errors.InvalidArgumentError, match="micro-batch"):
        run(lambda x, e: kernels.token_sum(x, x, False, (), e), [numbers(6, 2), np.array(ends)])
