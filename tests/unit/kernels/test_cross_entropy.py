"""The compiled cross-entropy of the words and of a cluster, compared with float64."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from tests.unit.kernels.arrays import assert_near, numbers, run, softmax_inputs


def exact_cross_entropy(hidden, weights, bias, targets, scale):
    """Loss, nll, and the gradients of the loss, in float64."""
    hidden, weights, bias = (x.astype(np.float64) for x in (hidden, weights, bias))
    logits = hidden @ weights + bias
    logits -= logits.max(axis=1, keepdims=True)
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = np.arange(len(targets))
    nll = -np.log(softmax[rows, targets])
    softmax[rows, targets] -= 1
    d = softmax * scale[:, None]
    return (scale * nll).sum(), nll, [d @ weights.T, hidden.T @ d, d.sum(axis=0)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("N, H, V", [(1, 1, 2), (5, 3, 7), (9, 33, 1001), (20, 50, 10000)])
def test_cross_entropy_and_its_gradient(N, H, V, index, precision):
    inputs, targets, scale = softmax_inputs(N, H, V)

    def ours(*placeholders):
        loss, nll = kernels.softmax_cross_entropy(
            *placeholders, targets.astype(index), scale, precision
        )
        # Double the loss, so that the incoming gradient is not 1.
        return loss, nll, [g / 2 for g in tf.gradients(2 * loss, placeholders)]

    actual = run(ours, inputs)
    expected = exact_cross_entropy(*inputs, targets, scale)
    for a, e in zip(tf.nest.flatten(actual), tf.nest.flatten(expected)):
        assert_near(a, e, precision)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_transposed_weights_do_not_change_the_cross_entropy(precision):
    (hidden, weights, bias), targets, scale = softmax_inputs(20, 33, 1001)

    def losses(*placeholders, transposed=False):
        loss, nll = kernels.softmax_cross_entropy(
            *placeholders, targets, scale, precision, micro_batches=[2, 0, 3], transposed=transposed
        )
        return [loss, nll, *tf.gradients(loss, placeholders)]

    expected = run(losses, [hidden, weights, bias])
    actual = run(lambda *p: losses(*p, transposed=True), [hidden, weights.T, bias])
    actual[3] = actual[3].T
    for a, e in zip(actual, expected):
        np.testing.assert_array_equal(a, e)


def test_evaluation_has_the_same_results_without_a_gradient():
    inputs, targets, scale = softmax_inputs(9, 5, 100)
    without = []

    def losses(*placeholders):
        trained = kernels.softmax_cross_entropy(*placeholders, targets, scale)
        evaluated = kernels.softmax_cross_entropy(*placeholders, targets, scale, training=False)
        without.extend(tf.gradients(evaluated[0], placeholders))
        return trained, evaluated

    trained, evaluated = run(losses, inputs)
    np.testing.assert_array_equal(trained[1], evaluated[1])
    assert without == [None] * 3


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_cross_entropy_propagates_nan(where, bad, precision):
    inputs, targets, scale = softmax_inputs(3, 4, 50)
    inputs[0] = np.abs(inputs[0])  # otherwise, an infinite weight may lead to a valid logit of -inf
    inputs[where].flat[2] = bad
    loss, _ = run(lambda *p: kernels.softmax_cross_entropy(*p, targets, scale, precision), inputs)
    assert not np.isfinite(loss)


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    inputs, targets, scale = softmax_inputs(3, 4, 7)
    targets[1] = target
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"targets\[1\] = {target} "):
        run(lambda *p: kernels.softmax_cross_entropy(*p, targets, scale), inputs)


def cluster_inputs(N, V, K):
    targets = np.random.default_rng(V).integers(V, size=N)
    return [numbers(N, K), numbers(V, K), targets, numbers(N)]


def cluster_results(inputs, precision="float32", ends=None):
    def results(hidden, words, targets, dnll):
        of_batches = ends and tf.constant(ends, tf.int64)
        nll = kernels.cluster_cross_entropy(hidden, words, targets, precision, of_batches)
        return [nll, *tf.gradients(nll, [hidden, words], dnll)]

    return run(results, inputs)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
# Up to 8 units, a thread processes 4,096 words at a time, with more than 64 units 256.
@pytest.mark.parametrize(
    "N, V, K",
    [(1, 1, 1), (3, 7, 2), (14, 300, 4), (5, 4100, 8), (23, 5000, 16), (9, 520, 64), (50, 1100, 65),
     (7, 301, 170)],
)  # fmt: skip
def test_cluster_cross_entropy_and_its_gradient(N, V, K, precision):
    inputs = cluster_inputs(N, V, K)
    ends = [0, N // 2, N // 2, N]  # two of the micro-batches are empty
    found = cluster_results(inputs, precision, ends)
    hidden, words, targets, dnll = (x.astype(np.float64) for x in inputs)
    targets = targets.astype(int)
    logits = hidden @ words.T
    exponentials = np.exp(logits)
    sums = exponentials.sum(axis=1)
    dlogits = exponentials / sums[:, None]
    dlogits[np.arange(N), targets] -= 1
    dlogits *= dnll[:, None]
    nll = np.log(sums) - logits[np.arange(N), targets]
    for one, other in zip(found, [nll, dlogits @ words, dlogits.T @ hidden]):
        assert_near(one, other, precision)


def test_nan_in_a_word_of_a_cluster_shows_in_the_loss():
    inputs = cluster_inputs(5, 600, 3)
    inputs[1][430, 1] = np.nan
    nll, _, _ = cluster_results(inputs)
    assert np.isnan(nll).all()


@pytest.mark.parametrize("K", [4, 40])
def test_results_of_a_cluster_do_not_depend_on_other_tokens(K):
    inputs = cluster_inputs(61, 1000, K)

    def some(rows):
        hidden, words, targets, dnll = inputs
        return cluster_results([hidden[rows], words, targets[rows], dnll[rows]])[:2]

    every = np.arange(61)
    whole = some(every)
    for rows in every[:1], every[1:18], every[16:49], every[3:59:2], every[::-1], every[:0]:
        for found, all_rows in zip(some(rows), whole):
            np.testing.assert_array_equal(found, all_rows[rows])


@pytest.mark.parametrize("target", [-1, 600])
def test_a_word_outside_of_a_cluster_is_an_error(target):
    inputs = cluster_inputs(5, 600, 3)
    inputs[2][1] = target
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"targets\[1\] = {target}"):
        cluster_results(inputs)
