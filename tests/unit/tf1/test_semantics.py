"""Results that TF 1.x and TensorFlow 2 compute differently: defaults, names and loops."""

import dataclasses

import numpy as np
import tensorflow.compat.v1 as tf

from tests.unit.model.networks import needs_tf_keras, train, train_and_evaluate
from tests.unit.tf1.conftest import CONFIG, outputs_of

pytestmark = needs_tf_keras


DEFAULTS = """
import tensorflow as tf

def build(x, is_training):
    w = tf.get_variable("w", [400, 200])
    return tf.layers.dense(x, 4) + tf.reduce_mean(w)
"""


def test_the_default_initializer_is_that_of_tf1(load):
    _, weights = outputs_of(load(model=DEFAULTS))
    for name, (rows, columns) in {"w": (400, 200), "dense/kernel": (4, 4)}.items():
        limit = np.sqrt(6 / (rows + columns))  # Glorot and Bengio (2010), equation 16
        assert 0.7 * limit < np.abs(weights[name]).max() <= limit
    assert np.abs(weights["embedding"]).max() <= 0.1  # init_scale: of the config file


LOOPS = """
import tensorflow as tf

def build(x, is_training):
    cell = tf.nn.rnn_cell.DropoutWrapper(tf.nn.rnn_cell.BasicRNNCell(4), output_keep_prob=0.5)
    lengths = tf.fill([x.shape[1]], 4)  # a step less than T
    y, _ = tf.nn.dynamic_rnn(cell, x, lengths, dtype=tf.float32, time_major=True)
    z = tf.map_fn(lambda step: tf.nn.dropout(step, 0.5), tf.ones(x.shape))

    def draw_two(index, total):
        _, inner = tf.while_loop(
            lambda i, _: i < 2,
            lambda i, parts: (i + 1, parts.write(i, tf.random_uniform(x.shape[1:2]))),
            [0, tf.TensorArray(tf.float32, 2)])
        return index + 1, total.write(index, inner.stack())

    _, draws = tf.while_loop(lambda i, _: i < 5, draw_two, (0, tf.TensorArray(tf.float32, 5)))
    (count,) = tf.while_loop(lambda i: i < 3, lambda i: [i + 1], [0], return_same_structure=True)
    single = tf.while_loop(lambda i: i < 3, lambda i: i + 1, [0])
    with tf.control_dependencies([tf.debugging.assert_equal([count, single], 3)]):
        return tf.concat([y, z, tf.transpose(draws.stack(), [0, 2, 1])], 2)
"""


def test_each_iteration_of_a_loop_draws_its_own_numbers(load):
    file = load(model=LOOPS)
    outputs, _ = outputs_of(file)
    y, z, draws = outputs[..., :4], outputs[..., 4:8], outputs[..., 8:]
    assert (y[4] == 0).all()  # after the end of the rows
    for masks in (y[:4] == 0, z == 0):
        assert 0.2 < (masks[1:] != masks[:-1]).mean() < 0.8  # 0.5 is expected
    assert len(np.unique(draws)) == draws.size
    assert (outputs == outputs_of(file)[0]).all()
    assert (outputs != outputs_of(file, step=4)[0]).any()
    losses = train_and_evaluate(file)
    assert losses[-1] < losses[0]


SAMPLED = """
import tensorflow as tf

def build(x, words):
    w, b = tf.get_variable("w", [11, 4]), tf.get_variable("b", [11])
    labels, x = tf.reshape(words, [-1, 1]), tf.reshape(x, [-1, 4])
    losses = tf.nn.sampled_softmax_loss(w, b, labels, x, 7, 11)
    sampled = tf.nn.uniform_candidate_sampler(tf.cast(labels, tf.int64), 1, 5, False, 11)
    losses += tf.nn.nce_loss(w, b, labels, x, 5, 11, sampled_values=sampled)
    return tf.reshape(losses, words.shape)
"""
WITH_LOSSES = (
    CONFIG[: CONFIG.index("def build")]
    + """
def build_losses(inputs_TB, targets_TB, state, context):
    return model.build(context.embed(inputs_TB), targets_TB), {{}}
"""
)


def test_sampled_losses_are_reproducible(load, caplog):
    file = load(WITH_LOSSES, model=SAMPLED)
    losses = train_and_evaluate(file)
    assert losses == train_and_evaluate(file)
    assert losses[-1] < losses[0]
    assert train_and_evaluate(file, seed=2) != losses
    assert "not reproducible" not in caplog.text


NAMES = """
import tensorflow as tf

def build(x, is_training):
    first = tf.Variable(tf.zeros([4]))
    with tf.variable_scope("lstm"):
        tf.get_variable("w", [4])
        with tf.name_scope("softmax"):
            tf.get_variable("u", [4])
            y = x * tf.Variable(tf.ones([4])) + tf.Variable(tf.zeros([4]), name="w")
            y += tf.Variable(tf.zeros([4]), name="w")
        y += tf.Variable(tf.zeros([4]), name="w")
    with tf.variable_scope("lstm", reuse=True):
        y += tf.Variable(tf.zeros([4]), name="b") + tf.get_variable("w", [4])
    return y + first
"""


def names_in_tf1(text):
    """Return the names of the variables that TensorFlow creates in graph mode."""
    program = {}
    exec(text.replace("import tensorflow as", "import tensorflow.compat.v1 as"), program)
    with tf.Graph().as_default():
        program["build"](tf.ones([5, 3, 4]), True)
        return {variable.op.name for variable in tf.global_variables()}


def test_names_of_variables_are_those_of_tf1(load):
    file = load(model=NAMES)
    assert outputs_of(file)[1].keys() - {"embedding"} == names_in_tf1(NAMES)
    assert train_and_evaluate(file)


CONSTRAINTS = """
import tensorflow as tf

def build(x, is_training):
    two = lambda w: tf.clip_by_value(w, 2, 4 // w.shape[0].value * 2)
    collections = [tf.GraphKeys.GLOBAL_VARIABLES, "scales"]
    tf.Variable(tf.ones([4]), collections=collections, constraint=two)
    (w,) = tf.get_collection("scales")
    return tf.keras.layers.Dense(4, kernel_constraint=two)(x * w)
"""


def test_variables_keep_their_constraints_and_collections(load):
    file = load(model=CONSTRAINTS)
    values = train(dataclasses.replace(file.config, optimizer="adam"), file.functions, steps=1)
    assert (values["Variable"] == 2).all() and (values["dense/kernel"] == 2).all()
