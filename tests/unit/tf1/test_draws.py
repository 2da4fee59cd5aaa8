"""Random numbers of TF 1.x programs: reproducible, without edits."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.model.context import Context
from lm.model.network import Network
from tests.unit.model.networks import needs_tf_keras

pytestmark = needs_tf_keras

LAYERS = """
import tensorflow as tf

def build(x, is_training):
    width = tf.Variable(tf.truncated_normal([4]) / 3.0, name="width")
    scale = tf.get_variable("scale", initializer=tf.random_uniform([4], 0.5, 1.0))
    x = tf.nn.dropout(x * width * scale, 0.5, noise_shape=[5, 1, 4])
    x = tf.nn.dropout(x, rate=tf.constant(0.5))
    x = tf.layers.dropout(x, 0.5, training=is_training)
    noise = tf.random_normal(tf.shape(x)) + tf.to_float(tf.random.uniform([4], 1, 5, tf.int32))
    return x + 0.01 * noise
"""
CELLS = """
import tensorflow as tf

def build(x, is_training):
    cell = tf.contrib.rnn.BasicLSTMCell(4)
    if is_training:
        cell = tf.contrib.rnn.DropoutWrapper(cell, output_keep_prob=0.5)
        cell = tf.contrib.rnn.DropoutWrapper(
            cell, state_keep_prob=0.5, variational_recurrent=True, dtype=tf.float32)
    return tf.nn.dynamic_rnn(cell, x, dtype=tf.float32, time_major=True)[0]
"""


def outputs_of(file, step, num_words=11):
    """Return the outputs and the initial values of the network at a step, or in evaluation."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        network = Network(file.config, num_words, file.functions)
        context = Context(
            file.config, num_words, num_rows=4, step=None if step is None else tf.constant(step)
        )
        outputs, _ = network.build(tf.ones([5, 4], tf.int32), {}, context)
        assert not [op.type for op in graph.get_operations() if "seed2" in op.node_def.attr]
        session.run(tf.global_variables_initializer())
        weights = {v.op.name: session.run(v).tobytes() for v in tf.trainable_variables()}
        return session.run(outputs), weights


@pytest.mark.parametrize("text", [LAYERS, CELLS])
def test_draws_depend_only_on_the_step(load, text):
    file = load(model=text)
    step = np.int64(3)
    first, weights = outputs_of(file, step)
    again, same_weights = outputs_of(file, step)
    np.testing.assert_array_equal(first, again)
    assert weights == same_weights
    other, same_weights = outputs_of(file, step + 1)
    assert (first != other).any() and weights == same_weights
    assert ((first == 0).mean() > 0.2) == (text == CELLS)


def test_dropout_applies_only_in_training(load):
    assert (outputs_of(load(model=CELLS), None)[0] != 0).all()
