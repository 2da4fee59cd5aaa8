"""The adaptive softmax, compared with the equations of its paper and with PyTorch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.model import adaptive
from lm.model.adaptive import AdaptiveWeights, Cluster
from lm.model.ops import fastest, plain_ops
from tests.unit.kernels.arrays import numbers, run

N, H, V = 23, 28, 97
CUTOFFS, UNITS = [10, 30, 60], [9, 3, 1]  # the factor is 3


def arrays():
    """Return the weights as a list of arrays: head, bias, and two for each cluster."""
    sizes = np.diff([*CUTOFFS, V])
    clusters = [(numbers(H, k), numbers(size, k)) for size, k in zip(sizes, UNITS)]
    head = numbers(H, CUTOFFS[0] + len(CUTOFFS))
    return [head, numbers(head.shape[1]), *(array for cluster in clusters for array in cluster)]


def as_weights(tensors):
    head, bias, *rest = tensors
    clusters = [Cluster(*pair) for pair in zip(rest[::2], rest[1::2])]
    return AdaptiveWeights(CUTOFFS, head, bias, clusters)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def exact_log_probs(outputs, head, bias, *clusters):
    """Return the log-probabilities of all words, as in the paper."""
    outputs, head, bias, *clusters = (
        x.astype(np.float64) for x in (outputs, head, bias, *clusters)
    )
    of_head = log_softmax(outputs @ head + bias)
    parts = [of_head[:, : CUTOFFS[0]]]
    for c, (projection, words) in enumerate(zip(clusters[::2], clusters[1::2])):
        of_words = log_softmax(outputs @ projection @ words.T)
        parts.append(of_head[:, CUTOFFS[0] + c, None] + of_words)
    return np.concatenate(parts, axis=1)


def all_log_probs(outputs, *weights):
    return adaptive.log_probs(as_weights(weights), outputs, plain_ops())


# Words of the head and of each cluster, of the head only, and of the last cluster only.
TARGETS = {
    "all": np.random.default_rng(1).integers(V, size=N),
    "head": np.arange(N) % CUTOFFS[0],
    "last": V - 1 - np.arange(N),
}


def loss_and_gradients(outputs, targets, scale, *weights, ops=None):
    inputs = [as_weights(weights), outputs, targets, scale]
    loss, nll = adaptive.cross_entropy(*inputs, ops or fastest(), training=True)
    return [nll, loss, *tf.gradients(loss, [outputs, *weights])]


def exact_loss_and_gradients(outputs, targets, scale, *weights):
    nll = -tf.gather(all_log_probs(outputs, *weights), targets, batch_dims=1)
    loss = tf.reduce_sum(scale * nll)
    return [nll, loss, *tf.gradients(loss, [outputs, *weights])]


def test_log_probs_equal_the_equations_and_sum_to_one():
    found = run(all_log_probs, [numbers(N, H), *arrays()])
    np.testing.assert_allclose(found, exact_log_probs(numbers(N, H), *arrays()), atol=1e-5)
    np.testing.assert_allclose(np.exp(found.astype(np.float64)).sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_loss_and_gradients_equal_the_equations(path, targets):
    inputs = [numbers(N, H), targets.astype(np.int32), np.abs(numbers(N)), *arrays()]
    found = run(loss_and_gradients, inputs)
    exact = [x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs]
    for one, other in zip(found, run(exact_loss_and_gradients, exact)):
        np.testing.assert_allclose(one, other, atol=1e-5)
