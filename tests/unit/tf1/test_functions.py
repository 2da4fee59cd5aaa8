"""Functions of TF 0.x and 1.x that TensorFlow 2 removed or changed."""

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.platform import tf_logging

from tests.unit.model.networks import needs_tf_keras, train_and_evaluate
from tests.unit.tf1.conftest import needs_tf_slim

CELLS = """
import tensorflow as tf
from tensorflow.python.ops import rnn_cell

def build(x, is_training):
    cells = [tf.contrib.rnn.LSTMBlockCell(4), rnn_cell.GRUCell(4)]
    cell = tf.nn.rnn_cell.MultiRNNCell(cells)
    return tf.nn.dynamic_rnn(cell, x, None, None, tf.float32, None, False, True)[0]
"""
SLIM = """
import tensorflow as tf
import tensorflow.contrib.slim as slim
from tensorflow.contrib.framework import add_arg_scope
from tensorflow.contrib.layers.python.layers import layers

def build(x, is_training):
    x = tf.contrib.layers.layer_norm(x, begin_norm_axis=-1)
    x = slim.fully_connected(x, 6, weights_initializer=tf.contrib.layers.xavier_initializer())
    w = tf.get_variable("w", [4], initializer=tf.contrib.layers.xavier_initializer())
    x += tf.contrib.layers.embed_sequence(tf.zeros(x.shape[:-1], tf.int32), 3, 6)
    step = tf.contrib.framework.get_or_create_global_step()
    tf.train.exponential_decay(0.1, step, 10, 0.9)
    tf.contrib.layers.optimize_loss(tf.reduce_mean(x), step, 0.1, "Adam", clip_gradients=5.0)
    slim.learning.create_train_op(tf.reduce_mean(x), tf.train.AdamOptimizer())
    return tf.layers.dense(x, 4, kernel_regularizer=None) * w
"""


LOSSES = """
import tensorflow as tf

def cross_entropy(labels, logits):
    assert labels.shape == [15] and logits.shape == [15, 7]
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)

def build(x, is_training):
    logits, targets = tf.random.stateless_normal([3, 5, 7], [1, 2]), tf.zeros([3, 5], tf.int32)
    weights = tf.constant([[1., 0., 1., 1., 0.]] * 3)
    total = tf.contrib.seq2seq.sequence_loss(logits, targets, weights)
    by_step = tf.contrib.seq2seq.sequence_loss(
        logits, targets, weights, average_across_timesteps=False)
    by_example = tf.contrib.legacy_seq2seq.sequence_loss_by_example(
        tf.unstack(logits, axis=1), tf.unstack(targets, axis=1), tf.unstack(weights, axis=1))
    whole = tf.contrib.legacy_seq2seq.sequence_loss(
        tf.unstack(logits, axis=1), tf.unstack(targets, axis=1), tf.unstack(weights, axis=1))
    of_function = tf.contrib.seq2seq.sequence_loss(
        logits, targets, weights, softmax_loss_function=cross_entropy)
    of_sums = tf.contrib.seq2seq.sequence_loss(
        logits, targets, 2 * weights, average_across_timesteps=False, average_across_batch=False,
        sum_over_timesteps=True, sum_over_batch=True)
    at_once = tf.contrib.legacy_seq2seq.sequence_loss_by_example(
        [tf.reshape(logits, [15, 7])], [targets], [tf.reshape(weights, [15])])
    losses = -tf.nn.log_softmax(logits)[..., 0] * weights
    close = [
        tf.debugging.assert_near(total, tf.reduce_sum(losses) / 9),
        tf.debugging.assert_near(by_step, tf.reduce_sum(losses, 0) / 3),
        tf.debugging.assert_near(by_example, tf.reduce_sum(losses, 1) / 3),
        tf.debugging.assert_near(whole, tf.reduce_sum(losses) / 9),
        tf.debugging.assert_near(of_function, tf.reduce_sum(losses) / 9),
        tf.debugging.assert_near(of_sums, 2 * tf.reduce_sum(losses) / 9),
        tf.debugging.assert_near(at_once, tf.reshape(losses, [15])),
    ]
    with tf.control_dependencies(close):
        return tf.identity(x)
"""


PARTITIONED = """
import tensorflow as tf

def build(x, is_training):
    ids = tf.constant([[0, 1, 2], [3, 4, 10]])
    partitioner = tf.fixed_size_partitioner(4)
    with tf.variable_scope("parts", partitioner=partitioner):
        table = tf.get_variable("table", initializer=tf.range(11.), trainable=False)
    close = [
        tf.debugging.assert_equal(tf.nn.embedding_lookup(table, ids), tf.constant(MOD)),
        tf.debugging.assert_equal(tf.nn.embedding_lookup(table, ids, "div"), tf.to_float(ids)),
    ]
    with tf.control_dependencies(close):
        return tf.identity(x)
"""


def test_rows_of_partitioned_variables_are_those_of_tensorflow(load):
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable(
            "table", [11], partitioner=tf.fixed_size_partitioner(4),
            initializer=lambda shape, dtype, partition_info: (
                tf.range(shape[0], dtype=dtype) + partition_info.var_offset[0]),
        )  # fmt: skip
        found = tf.nn.embedding_lookup(table, [[0, 1, 2], [3, 4, 10]])
        session.run(tf.global_variables_initializer())
        of_tensorflow = session.run(found).tolist()
    assert of_tensorflow[0][1] != 1
    assert train_and_evaluate(load(model=PARTITIONED.replace("MOD", str(of_tensorflow))))


OLD_ORDERS = """
import tensorflow as tf
from tensorflow.python.ops import array_ops

def build(x, is_training):
    tf.scalar_summary("mean", tf.reduce_mean(x))
    logits, labels = tf.random.stateless_normal([3, 7], [1, 2]), tf.constant([1, 0, 6])
    probabilities, log_p = tf.one_hot(labels, 7), tf.nn.log_softmax(logits)
    losses = tf.nn.softmax_cross_entropy_with_logits(logits, probabilities)
    close = [
        tf.debugging.assert_near(losses, -tf.reduce_sum(probabilities * log_p, 1)),
        tf.debugging.assert_near(
            losses, tf.nn.sparse_softmax_cross_entropy_with_logits(logits, labels)),
        tf.debugging.assert_near(
            tf.nn.sigmoid_cross_entropy_with_logits(logits, probabilities),
            -tf.log_sigmoid(logits * (2 * probabilities - 1))),
        tf.debugging.assert_equal(tf.concat(0, tf.split(0, 5, x)), tf.concat(tf.split(x, 5, 0), 0)),
        tf.debugging.assert_equal(array_ops.concat(0, array_ops.split(0, 5, x)), x),
        tf.debugging.assert_equal(array_ops.pack(array_ops.unstack(x)), x),
        tf.debugging.assert_equal(*(
            tf.nn.sampled_softmax_loss(
                tf.ones([7, 7]), tf.zeros([7]), *order, 2, 7, sampled_values=(
                    tf.constant([3, 4], tf.int64), tf.ones([3, 1]), tf.ones([2])))
            for order in [(logits, labels[:, None]), (labels[:, None], logits)])),
    ]
    with tf.control_dependencies(close):
        return tf.identity(x)
"""
DECODER = """
import tensorflow as tf
from tensorflow.contrib import legacy_seq2seq
from tensorflow.python.ops.rnn_cell import _linear
from tensorflow.python.util import nest

def build(x, is_training):
    assert nest.is_sequence([x]) and not nest.is_sequence(x)
    x = tf.stack([_linear([y, y], 4, True, scope=f"step_{i}") for i, y in enumerate(tf.unstack(x))])
    cell = tf.nn.rnn_cell.BasicRNNCell(4)
    steps, start = tf.unstack(x), cell.zero_state(x.shape[1], tf.float32)
    outputs, last = legacy_seq2seq.rnn_decoder(steps, start, cell)
    expected, expected_last = tf.nn.static_rnn(cell, steps, start)
    looped, _ = legacy_seq2seq.rnn_decoder(steps, start, cell, lambda output, step: steps[step])
    close = [
        tf.debugging.assert_equal(outputs, expected),
        tf.debugging.assert_equal(outputs, looped),
        tf.debugging.assert_equal(last, expected_last),
    ]
    with tf.control_dependencies(close):
        return tf.stack(outputs)
"""

OLD_CELL = """
import tensorflow as tf

class Cell(tf.nn.rnn_cell.RNNCell):
    state_size = output_size = 4

    def __call__(self, inputs, state, scope=None):
        with tf.variable_scope(scope or "cell"):
            state = tf.tanh(inputs @ tf.get_variable("w", [4, 4]) + state)
        return state, state

def build(x, is_training):
    cell, steps = Cell(), tf.unstack(x)
    start = cell.zero_state(x.shape[1], tf.float32)
    return tf.stack(tf.contrib.legacy_seq2seq.rnn_decoder(steps, start, cell)[0])
"""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(OLD_ORDERS, id="old_orders"),
        pytest.param(DECODER, marks=needs_tf_keras, id="decoder"),
        pytest.param(OLD_CELL, marks=needs_tf_keras, id="old_cell"),
        pytest.param(CELLS, marks=needs_tf_keras, id="cells"),
        pytest.param(SLIM, marks=[needs_tf_keras, needs_tf_slim], id="layers"),
        pytest.param(LOSSES, id="losses"),
    ],
)
def test_functions_of_old_versions(load, text):
    losses = train_and_evaluate(load(model=text))
    assert losses[-1] < losses[0]


SHARED_CELL = """
import tensorflow as tf

def build(x, is_training):
    cell = tf.nn.rnn_cell.MultiRNNCell([tf.nn.rnn_cell.BasicRNNCell(4)] * 2)
    return tf.nn.dynamic_rnn(cell, x, dtype=tf.float32, time_major=True)[0]
"""


@needs_tf_keras
def test_a_cell_in_two_layers_causes_a_warning(load, caplog):
    tf_logging._log_counter_per_token.clear()  # TensorFlow warns only once per process
    tf.logging.set_verbosity(tf.logging.ERROR)  # like a command
    train_and_evaluate(load(model=SHARED_CELL))
    assert "the same object and will share weights" in caplog.text
    assert "deprecated" not in caplog.text
