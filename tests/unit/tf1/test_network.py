"""The functions of a config file from `tf1.network`."""

import logging

import pytest

from lm.errors import UserError
from lm.user.network_check import check_network
from tests.unit.model.networks import V, needs_tf_keras, train_and_evaluate

pytestmark = needs_tf_keras

OBJECT = """
import tensorflow as tf

class Model:
    def __init__(self, rows, steps, size, units=4):
        self.input_data = tf.placeholder(tf.int32, [rows, steps])
        self.targets = tf.placeholder(tf.int32, [rows, steps])
        cells = [tf.contrib.rnn.BasicLSTMCell(units), tf.contrib.rnn.GRUCell(units)]
        cell = tf.contrib.rnn.MultiRNNCell(cells)
        tf.while_loop(lambda i: i < 1, lambda i: (cell.zero_state(7, tf.float32), i + 1)[1], [0])
        self.initial_state = cell.zero_state(rows, tf.float32)  # not of the loop, not with 7 rows
        embedding = tf.get_variable("embedding", [size, units])
        inputs = [tf.squeeze(x, [1]) for x in tf.split(
            tf.nn.embedding_lookup(embedding, self.input_data), steps, 1)]
        outputs, self.final_state = tf.contrib.legacy_seq2seq.rnn_decoder(
            inputs, self.initial_state, cell)
        output = tf.reshape(tf.concat(outputs, 1), [-1, units])
        logits = tf.matmul(output, tf.get_variable("softmax_w", [units, size]))
        loss = tf.contrib.legacy_seq2seq.sequence_loss_by_example(
            [logits], [tf.reshape(self.targets, [-1])], [tf.ones([rows * steps])])
        self.lr = tf.Variable(0.0, trainable=False)
        tf.train.AdamOptimizer(self.lr).minimize(tf.reduce_sum(loss))
"""
DICTIONARY = """
import tensorflow as tf

def model(words, size):
    x = tf.get_variable("x", [size, 4])
    hidden = tf.layers.dense(tf.gather(x, words), 4, activation=tf.nn.relu)
    return {"logits": tf.layers.dense(hidden, size), "final_state": tf.zeros([4])}

def nothing(words):
    pass
"""
WINDOWS = """
import tensorflow as tf

def model(words, size):
    x = tf.gather(tf.get_variable("x", [size, 4]), words)
    outputs, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(4), x, dtype=tf.float32)
    return {"logits": tf.layers.dense(outputs, size)}
"""
CONFIG = """
from lm import tf1
from lm.config import Config

model = tf1.load("{path}")

def get_config():
    return Config(name="mine", num_steps=5, batch_size=4)

state_shapes, build_logits = tf1.network(
    lambda words, context: model.{call}
)
"""


LAST_WORDS = """
def reads_words(config):
    return config.num_steps

del state_shapes
"""


def load_network(load, text, call):
    end = LAST_WORDS if text == WINDOWS else ""
    return load(CONFIG.replace("{call}", call) + end, model=text)


@pytest.mark.parametrize(
    "text, call",
    [
        (OBJECT, "Model(*words.shape, context.vocab_size), state='final_state'"),
        (DICTIONARY, "model(words, context.vocab_size), logits='logits'"),
        (WINDOWS, "model(words, context.vocab_size), logits='logits'"),
    ],
    ids=["object", "dictionary", "windows"],
)
def test_models_train_and_use_their_state(load, caplog, text, call):
    file = load_network(load, text, call)
    losses = train_and_evaluate(file)
    assert losses[-1] < losses[0]
    check_network(file.config, V, file.functions)
    assert "state" not in caplog.text and "different" not in caplog.text
    if text == OBJECT:
        shapes = file.functions.by_name["state_shapes"](file.config)
        assert shapes == {"0": [4], "1": [4], "2": [4]}


def test_only_placeholders_with_two_axes_receive_the_words(load, caplog):
    caplog.set_level(logging.INFO, "lm")
    scalar = "        number = tf.placeholder(tf.int32, [], 'number')\n        self.input"
    text, used = OBJECT.replace("        self.input", scalar, 1), "inputs[0] *= tf.to_float(number)"
    targets = "self.targets = tf.placeholder(tf.int32, [rows, steps]"
    text = text.replace(f"\n        {targets}", f"; {targets}, 'targets'")
    call = "Model(*words.shape, context.vocab_size), state='final_state'"
    assert train_and_evaluate(load_network(load, text, call))
    receive = [record.message for record in caplog.records if "receives" in record.message]
    assert len(receive) == 2
    assert "model.py, line 7: this placeholder receives the words; pass other" in receive[0]
    assert "model.py, line 7: the placeholder targets receives the words" in receive[1]
    text = text.replace("        outputs, self", f"        {used}\n        outputs, self")
    with pytest.raises(UserError, match=r"line 6: .*the placeholder .*number_not_fed"):
        train_and_evaluate(load(CONFIG.replace("{call}", call), used=text))


OWN_ZERO_STATE = """
import tensorflow as tf

class Cell(tf.nn.rnn_cell.GRUCell):
    def zero_state(self, batch_size, dtype):
        return tf.zeros([batch_size, 4], dtype)

"""


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "self.final_state = (*self.final_state, loss)",
            "final_state has 4 parts, but the zero_state calls of the cells return 3",
        ),
        (
            "tf.losses.sparse_softmax_cross_entropy(self.targets, 2 * logits3)",
            "computes 2 different cross entropies; pass the name of its logits",
        ),
        (
            "tf.nn.softmax_cross_entropy_with_logits_v2(labels=logits3, logits=2 * logits3)",
            "computes 2 different cross entropies; pass the name of its logits",
        ),
        ("tf.losses.sparse_softmax_cross_entropy(self.targets, logits3)", None),
        ("tf.get_variable('v', initializer=np.ones([11, 2], 'f')[:size]); assert size == 11", None),
    ],
)
def test_the_logits_and_the_state_are_not_guessed(load, line, message):
    lines = ["logits3 = tf.reshape(logits, [rows, steps, size])", line, "self.lr ="]
    text = "import numpy as np" + OBJECT.replace("self.lr =", "\n        ".join(lines))
    file = load_network(load, text, "Model(*words.shape, context.vocab_size), state='final_state'")
    if message is None:
        assert train_and_evaluate(file)
        return
    with pytest.raises(UserError, match=message):
        train_and_evaluate(file)


def test_cells_may_define_their_zero_state(load):
    text = OWN_ZERO_STATE + OBJECT.replace("tf.contrib.rnn.GRUCell", "Cell")
    text = text.replace("tf.contrib.rnn.MultiRNNCell(cells)", "cells[1]")
    call = "Model(*words.shape, context.vocab_size), state='final_state'"
    file = load_network(load, text, call)
    assert file.functions.by_name["state_shapes"](file.config) == {"0": [4]}


@pytest.mark.parametrize(
    "call, message",
    [
        ("model(words, context.vocab_size)", "computes no cross entropy; pass the name"),
        ("model(words, context.vocab_size), logits='y'", "there is no y in final_state, logits"),
        ("nothing(words), logits='y'", "there is no y in the NoneType that build returned"),
        (
            "model(words, context.vocab_size), logits='logits', state='final_state'",
            "the program calls no zero_state of a cell, so final_state would not reach the next",
        ),
        (
            "model(model.tf.transpose(words), context.vocab_size), logits='logits'",
            r"the logits are \[T, B, V\]: return tf.transpose\(logits, \[1, 0, 2\]\)",
        ),
        (
            "model(words[:, :-1], context.vocab_size), logits='logits'",
            "the logits have one time step less than the words, .*: append any word to the words",
        ),
    ],
)
def test_missing_parts_are_one_line(load, call, message):
    with pytest.raises(UserError, match=f"mine.py.*{message}"):
        train_and_evaluate(load_network(load, DICTIONARY, call))
