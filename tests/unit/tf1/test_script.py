"""Files that build their graph at the top level."""

import pytest

from lm.errors import UserError
from lm.user.network_check import check_network
from tests.unit.model.networks import V, needs_tf_keras, train_and_evaluate

pytestmark = needs_tf_keras

SCRIPT = """
import tensorflow as tf
import parts

tf.app.flags.DEFINE_integer(flag_name="units", default_value=4, docstring="units of the cell")
FLAGS = tf.app.flags.FLAGS
batch_size = 32
num_steps, vocab_size = 35, 10000

tf.reset_default_graph()
x = tf.placeholder(tf.int32, [batch_size, num_steps], name="x")
y = tf.placeholder(tf.int32, [batch_size, num_steps], name="y")

def cell_of(units):
    return tf.nn.rnn_cell.GRUCell(units, name="cell_of_%d" % vocab_size)

cell = cell_of(FLAGS.units)
start = cell.zero_state(batch_size, tf.float32)
embedding = tf.get_variable("embedding", [vocab_size, FLAGS.units])
outputs, last = tf.nn.dynamic_rnn(cell, tf.nn.embedding_lookup(embedding, x), initial_state=start)
logits = parts.project(outputs, vocab_size)
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
gradients = tf.gradients(loss, tf.trainable_variables())
train_op = tf.train.AdamOptimizer(0.01).minimize(loss)
raise AssertionError("training starts")
"""
PARTS = """
import tensorflow as tf

def project(x, size):
    w = tf.Variable(tf.truncated_normal([x.get_shape()[-1].value, size], stddev=0.1), name="w")
    return tf.tensordot(x, w, 1)
"""
CONFIG = """
import tensorflow.compat.v1 as tf
from lm import tf1
from lm.config import Config

run = tf1.script("{path}")

def get_config():
    return Config(name="mine", num_steps=5, batch_size=4)

def state_shapes(config):
    return {{"h": [4]}}

def build_logits(inputs_TB, state, context):
    steps, rows = inputs_TB.shape
    words = tf.transpose(inputs_TB)
    with tf1.fed(words, words, zero_states=[state["h"]]):
        built = run(batch_size=rows, num_steps=steps, vocab_size=context.vocab_size)
    return tf.transpose(built.logits, [1, 0, 2]), {{"h": built.last}}
"""


def test_a_script_is_run_up_to_its_optimizer(load, caplog):
    file = load(CONFIG, script=SCRIPT, parts=PARTS)
    assert file.functions.loaded.keys() == {"program/script.py", "program/parts.py"}
    losses = train_and_evaluate(file)
    assert losses[-1] < losses[0]
    check_network(file.config, V, file.functions)
    assert not caplog.text


def test_a_variable_that_a_script_does_not_assign_is_an_error(load):
    text = CONFIG.replace("batch_size=rows", "batch_size=rows, keep_prop=1")
    with pytest.raises(UserError, match=r"script.py assigns no keep_prop before it creates an"):
        train_and_evaluate(load(text, script=SCRIPT, parts=PARTS))


def test_an_error_of_a_script_names_its_line(load):
    text = SCRIPT.replace("logits = parts.", "logits = parts.no_")
    with pytest.raises(UserError, match=r"broken.py, line 21: AttributeError: .*no_project"):
        load(CONFIG, broken=text, parts=PARTS)
