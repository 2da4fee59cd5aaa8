"""Keras layers, and cells of tf.contrib.rnn that only this program has."""

import numpy as np

from lm.user.network_check import check_network
from tests.unit.model.networks import V, needs_tf_keras, train_and_evaluate
from tests.unit.tf1.conftest import needs_tf_slim, outputs_of

pytestmark = needs_tf_keras

LAYERS = """
import tensorflow as tf
from tensorflow.python import tf2

assert not tf2.enabled()

class Scale(tf.keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight("scale", [shape[-1]], initializer="ones")

    def call(self, x):
        return x * self.scale

def build(x, is_training):
    with tf.variable_scope("a"):
        x = tf.keras.layers.Dense(6, activation=tf.nn.relu)(x)
        x = tf.keras.layers.Dense(4, name="top")(x)
    x = tf.keras.layers.Dropout(0.3)(Scale()(x), training=is_training)
    model = tf.keras.Sequential([tf.keras.layers.Dense(4)])
    model.compile(tf.train.AdamOptimizer(), "mse")
    return model(x)
"""


def test_keras_layers_share_their_variables(load, caplog):
    file = load(model=LAYERS)
    names = ("a/dense", "a/top", "sequential/dense_1")
    expected = {f"{name}/{part}" for name in names for part in ("kernel", "bias")}
    outputs, weights = outputs_of(file)
    assert weights.keys() - {"embedding"} == {"scale/scale", *expected}
    assert (outputs == outputs_of(file)[0]).all()
    assert weights["a/dense/kernel"].std() > 0.1
    losses = train_and_evaluate(file)
    assert losses[-1] < losses[0]
    assert "the program's optimizer is not used: set --optimizer" in caplog.text
    check_network(file.config, V, file.functions)
    assert "not reproducible" not in caplog.text and "different results" not in caplog.text


IN_TRAINING = """
import tensorflow as tf

def build(x, is_training):
    dropped = tf.keras.layers.Dropout(0.5)(tf.ones_like(x))
    return tf.concat([dropped, tf.keras.layers.BatchNormalization()(x)], 2)
"""


def test_keras_layers_know_whether_they_train(load, caplog):
    file = load(model=IN_TRAINING)
    outputs, _ = outputs_of(file)
    dropped, normalized = outputs[..., :4], outputs[..., 4:]
    assert set(np.unique(dropped)) == {0.0, 2.0}
    np.testing.assert_allclose(normalized, 0, atol=1e-5)  # all words are equal
    assert train_and_evaluate(file)
    assert "nothing executes" not in caplog.text  # the trainer updates the moving averages
    check_network(file.config, V, file.functions)
    assert "different results" not in caplog.text


CELLS = """
import tensorflow as tf
from tensorflow.contrib.framework import nest
from tensorflow.contrib.rnn import GRUBlockCell, LayerNormBasicLSTMCell, NASCell

def build(x, is_training):
    assert nest.is_sequence([x])
    nas, plain = NASCell(4, use_biases=True), LayerNormBasicLSTMCell(4, layer_norm=False)
    normalized = LayerNormBasicLSTMCell(4, dropout_keep_prob=0.9)
    cells = [GRUBlockCell(4), NASCell(4, num_proj=3), normalized]
    cell = tf.nn.rnn_cell.MultiRNNCell(cells)
    y, _ = tf.nn.dynamic_rnn(cell, x, dtype=tf.float32, time_major=True)
    forward, backward = tf.nn.rnn_cell.GRUCell(2), tf.nn.rnn_cell.GRUCell(2)
    both, _, _ = tf.nn.bidirectional_rnn(forward, backward, tf.unstack(y), dtype=tf.float32)

    c, rows = tf.fill([x.shape[1], 4], 0.5), x.shape[1]
    with tf.variable_scope("zeros", initializer=tf.zeros_initializer()):
        m, (new_c, _) = nas(x[0], (c, 0 * c))
    expected_c = tf.tanh(0.5) * tf.tanh(0.5) + 0 * c
    close = [
        tf.debugging.assert_near(new_c, expected_c),
        tf.debugging.assert_near(m, tf.tanh(expected_c * tf.tanh(tf.sigmoid(0.5)))),
    ]
    with tf.variable_scope("same", initializer=tf.zeros_initializer()):
        h, _ = plain(x[0], (c, 0 * c))
        same_h, _ = tf.nn.rnn_cell.BasicLSTMCell(4)(x[0], (c, 0 * c))
    close.append(tf.debugging.assert_near(h, same_h))
    with tf.variable_scope("norm"):
        h, (c, _) = LayerNormBasicLSTMCell(4)(x[0], (c, c))
    close.append(tf.debugging.assert_near(tf.reduce_mean(c, 1), tf.zeros([rows]), atol=1e-5))
    with tf.control_dependencies(close):
        return tf.stack(both)
"""


@needs_tf_slim
def test_cells_of_contrib_compute_their_equations(load):
    losses = train_and_evaluate(load(model=CELLS))
    assert losses[-1] < losses[0]
