"""The output layer against TensorFlow's own op and plain autodiff."""

import numpy as np
import tensorflow.compat.v1 as tf

from lm import softmax

N, H, V = 7, 5, 11


def run(make_nll, scale=1.0):
    random = np.random.default_rng(0)
    with tf.Graph().as_default(), tf.Session() as session:
        hidden = tf.constant(scale * random.normal(size=(N, H)), tf.float32)
        weights = tf.constant(random.normal(size=(H, V)), tf.float32)
        bias = tf.constant(random.normal(size=V), tf.float32)
        targets = tf.constant(random.integers(0, V, N), tf.int32)
        token_weights = tf.constant(random.uniform(size=N), tf.float32)
        nll = make_nll(hidden, weights, bias, targets)
        loss = tf.reduce_sum(nll * token_weights)
        return session.run([nll, *tf.gradients(loss, [hidden, weights, bias])])


def stock_nll(hidden, weights, bias, targets):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=targets, logits=tf.matmul(hidden, weights) + bias
    )


def test_nll_and_gradients_equal_the_stock_op():
    for ours, stock in zip(run(softmax.cross_entropy), run(stock_nll)):
        np.testing.assert_allclose(ours, stock, rtol=1e-4, atol=1e-6)


def test_large_logits_do_not_overflow():
    for ours, stock in zip(run(softmax.cross_entropy, 1e4), run(stock_nll, 1e4)):
        assert np.all(np.isfinite(ours))
        np.testing.assert_allclose(ours, stock, rtol=1e-4, atol=1e-2)


def test_nan_in_the_weights_shows_in_the_loss():
    def with_nan(hidden, weights, bias, targets):
        return softmax.cross_entropy(hidden, weights, bias + np.nan, targets)

    assert np.all(np.isnan(run(with_nan)[0]))
