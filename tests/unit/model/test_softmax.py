"""The adaptive softmax, compared with the equations of its paper and with PyTorch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.model import adaptive
from lm.model.adaptive import AdaptiveWeights, Cluster
from lm.model.ops import fastest, plain_ops
from tests.unit.kernels.arrays import numbers, run
from tests.unit.kernels.test_micro_batches import assert_equal_on_ranks, on_ranks

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


def test_loss_and_gradients_equal_pytorch(path):
    torch = pytest.importorskip("torch")
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(H, V, CUTOFFS, div_value=3.0, head_bias=True)
    parameters = [module.head.weight, module.head.bias]
    parameters += [layer.weight for tail in module.tail for layer in tail]
    # Only the words of a cluster have the same layout in both programs.
    transposed = [True, False, *[True, False] * len(CUTOFFS)]
    with torch.no_grad():
        for parameter, array, t in zip(parameters, arrays(), transposed):
            parameter.copy_(torch.from_numpy(array.T if t else array))
    outputs = torch.from_numpy(numbers(N, H)).requires_grad_()
    targets = TARGETS["all"]
    result = module(outputs, torch.from_numpy(targets))
    result.loss.backward()
    gradients = [p.grad.numpy().T if t else p.grad.numpy() for p, t in zip(parameters, transposed)]
    expected = [-result.output.detach().numpy(), result.loss.item()]
    expected += [outputs.grad.numpy(), *gradients]

    scale = np.full(N, 1 / N, np.float32)
    feeds = [numbers(N, H), targets.astype(np.int32), scale, *arrays()]
    found = run(loss_and_gradients, feeds)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, atol=1e-5)
    log_probs = run(all_log_probs, [numbers(N, H), *arrays()])
    np.testing.assert_allclose(log_probs, module.log_prob(outputs).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_results_do_not_depend_on_the_number_of_ranks(targets, precision):
    if not kernels.available():
        pytest.skip(kernels.description())
    steps, batch = 3, 20
    outputs = numbers(steps, batch, H)
    targets = np.resize(targets, [steps, batch]).astype(np.int32)

    def rank(micro_batches, outputs, targets):
        ops = fastest(precision, micro_batches)
        weights = [tf.constant(array) for array in arrays()]
        outputs = tf.reshape(outputs, [-1, H])
        targets, scale = tf.reshape(targets, [-1]), tf.fill(outputs.shape[:1], 1 / batch)
        nll, _, *gradients = loss_and_gradients(outputs, targets, scale, *weights, ops=ops)
        of_rows = nll[:, None], gradients[0]
        return gradients[1:], [tf.reshape(x, [steps, -1, x.shape[1]]) for x in of_rows]

    def ranks(*tensors):
        # 4 ranks have two micro-batches each: one tree per rank, and one tree over the ranks.
        return [on_ranks(num_ranks, rank, tensors) for num_ranks in (1, 4)]

    assert_equal_on_ranks(*run(ranks, [outputs, targets]))
