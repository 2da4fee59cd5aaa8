"""Random numbers of TF 1.x programs: reproducible, without edits."""

import numpy as np
import pytest

from tests.unit.model.networks import needs_tf_keras
from tests.unit.tf1.conftest import outputs_of

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


EXPERTS = """
import tensorflow as tf

def build(x, is_training):
    experts = tf.Variable(tf.stack([tf.random_normal([4]) for _ in range(12)]), name="experts")
    return x + tf.reduce_sum(experts)
"""


def test_the_draws_of_an_initial_value_are_independent(load):
    file = load(model=EXPERTS)
    experts = outputs_of(file)[1]["experts"]
    assert len(np.unique(experts)) == 48
    np.testing.assert_equal(outputs_of(file, step=4)[1]["experts"], experts)


@pytest.mark.parametrize("text", [LAYERS, CELLS])
def test_draws_depend_only_on_the_step(load, text):
    file = load(model=text)
    first, weights = outputs_of(file)
    np.testing.assert_equal(outputs_of(file), (first, weights))
    other, same_weights = outputs_of(file, step=4)
    assert (first != other).any()
    np.testing.assert_equal(same_weights, weights)
    assert ((first == 0).mean() > 0.2) == (text == CELLS)


@pytest.mark.parametrize("condition", ["is_training", "True"])
def test_dropout_applies_only_in_training(load, condition):
    file = load(model=CELLS.replace("is_training:", f"{condition}:"))
    plain = load(plain=CELLS.replace("is_training:", "False:"))
    np.testing.assert_array_equal(outputs_of(file, None)[0], outputs_of(plain, None)[0])
