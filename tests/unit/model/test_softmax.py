"""The output layer with large logits, compared with TensorFlow's own op."""

import numpy as np
import tensorflow.compat.v1 as tf

from lm.model.ops import fastest

N, H, V = 7, 5, 11


def run(make, scale):
    random = np.random.default_rng(0)
    with tf.Graph().as_default(), tf.Session() as session:
        hidden = tf.constant(scale * random.normal(size=(N, H)), tf.float32)
        weights = tf.constant(random.normal(size=(H, V)), tf.float32)
        bias = tf.constant(random.normal(size=V), tf.float32)
        targets = tf.constant(random.integers(0, V, N), tf.int32)
        scale_N = tf.constant(random.uniform(size=N), tf.float32)
        loss, nll = make(hidden, weights, bias, targets, scale_N)
        return session.run([nll, *tf.gradients(loss, [hidden, weights, bias])])


def ours(hidden, weights, bias, targets, scale):
    return fastest().cross_entropy(hidden, weights, bias, targets, scale, training=True)


def stock(hidden, weights, bias, targets, scale):
    nll = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=targets, logits=tf.matmul(hidden, weights) + bias
    )
    return tf.reduce_sum(nll * scale), nll


def test_large_logits_do_not_overflow(path):
    for found, expected in zip(run(ours, 1e4), run(stock, 1e4)):
        assert np.all(np.isfinite(found))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-2)
