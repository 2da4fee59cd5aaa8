"""The compiled ops compared with float64 for logits and gates of every size that float32 has."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from tests.unit.kernels.arrays import lstm_inputs, lstm_loss, numbers, run
from tests.unit.kernels.test_recurrence import plain_recurrence

SIZES = [s * x for x in (0.0, 1e-30, 1.0, 20.0, 90.75, 177.4, 1e3, 1e6, 1e9, 3e38) for s in (1, -1)]
# A row's logits are scale * u + offset, with u in [-1, 1].
ROWS = [(scale, offset) for scale in SIZES for offset in SIZES if abs(scale) + abs(offset) < 3.3e38]
LOSSES = {
    "cluster": lambda hidden, weights, targets, precision: kernels.cluster_cross_entropy(
        hidden, tf.transpose(weights), targets, precision
    ),
    "softmax": lambda hidden, weights, targets, precision: kernels.softmax_cross_entropy(
        hidden, weights, tf.zeros(weights.shape[1]), targets, tf.ones(len(targets)), precision
    ),
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("V", [1, 15, 33, 600])  # with and without words that pad a panel
def test_cross_entropy_of_logits_of_any_size(V, loss, precision):
    N = len(ROWS)
    kind = tf.bfloat16.as_numpy_dtype if precision == "bfloat16" else np.float32
    # A unit of its own for each row, with weights of zero: its gradient is that of the logits.
    hidden = np.hstack([ROWS, np.eye(N)]).astype(kind).astype(np.float32)
    weights = np.zeros([2 + N, V], np.float32)
    weights[0] = numbers(V).astype(kind)
    weights[1] = 1
    targets = np.arange(N) % V

    def results(*placeholders):
        losses = LOSSES[loss](*placeholders, targets, precision)
        nll = losses[-1] if loss == "softmax" else losses
        return [nll, *tf.gradients(losses[0] if loss == "softmax" else losses, placeholders)]

    nll, dhidden, dweights = run(results, [hidden, weights])
    logits = (hidden[:, :1] * weights[:1] + hidden[:, 1:2]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    exact = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(N), targets]
    with np.errstate(over="ignore"):
        exact = exact.astype(np.float32)  # may be infinite
    dlogits = probabilities - np.eye(V)[targets]
    tolerance = 1e-2 if precision == "bfloat16" else 2e-4
    np.testing.assert_allclose(nll, exact, rtol=1e-5, atol=2e-4)
    np.testing.assert_allclose(dweights[2:], dlogits, rtol=0, atol=tolerance)
    np.testing.assert_allclose(dhidden[:, :2], dlogits @ weights[:2].T, rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gates_of_any_size(precision):
    T, B, H = 2, 3 * len(SIZES), 5
    projected, bias, weights, h0, c0 = lstm_inputs(T, B, H)
    projected *= np.repeat(SIZES, 3).astype(np.float32)[:, None]
    c0 *= np.minimum(np.abs(np.tile(SIZES, 3)), 1e30).astype(np.float32)[:, None]

    def results(recurrence, *placeholders):
        outputs = recurrence(*placeholders)
        gradients = tf.gradients(lstm_loss(outputs[:2]), [placeholders[n] for n in (0, 3)])
        return [*outputs, *gradients]

    recurrence = functools.partial(kernels.lstm_recurrence, precision=precision)
    inputs = [projected, bias, weights, h0, c0]
    found = run(functools.partial(results, recurrence), inputs)
    exact = functools.partial(results, plain_recurrence)
    for x, y in zip(found, run(exact, [x.astype(np.float64) for x in inputs]), strict=True):
        tolerance = 3e-2 if precision == "bfloat16" else 1e-5
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
