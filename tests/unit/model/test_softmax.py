"""The output layer with large logits, compared with TensorFlow's own op."""

import numpy as np
import tensorflow.compat.v1 as tf

from lm.model.ops import fastest
from tests.unit.kernels.arrays import run, softmax_inputs


def stock(hidden, weights, bias, targets, scale):
    logits = tf.matmul(hidden, weights) + bias
    nll = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
    return tf.reduce_sum(nll * scale), nll


def test_large_logits_do_not_overflow(path):
    inputs, targets, scale = softmax_inputs(7, 5, 11)
    inputs[0] *= 1e4

    def results(*placeholders):
        arguments = [*placeholders, tf.constant(targets, tf.int32), scale]
        ours = fastest().cross_entropy(*arguments, training=True)
        return [[nll, *tf.gradients(loss, placeholders)] for loss, nll in (ours, stock(*arguments))]

    for found, expected in zip(*run(results, inputs)):
        assert np.all(np.isfinite(found))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-2)
