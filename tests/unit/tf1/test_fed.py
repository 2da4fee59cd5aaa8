"""Placeholders and initial states of TF 1.x programs."""

import pytest

from lm.errors import UserError
from tests.unit.model.networks import needs_tf_keras, train_and_evaluate
from tests.unit.tf1.conftest import CONFIG as PLAIN

pytestmark = needs_tf_keras

MODEL = """
import tensorflow as tf

class Model:
    def __init__(self, rows, steps, units):
        self.x = tf.placeholder(tf.float32, [rows, steps, units], name="x")
        self.scale = tf.placeholder(tf.float32, shape=())
        cell = tf.contrib.rnn.MultiRNNCell([tf.contrib.rnn.BasicLSTMCell(units)] * 1)
        cell = tf.contrib.rnn.DropoutWrapper(cell, 1.0)
        self.initial_state = cell.zero_state(rows, tf.float32)
        inputs = [tf.squeeze(x, [1]) for x in tf.split(self.x * self.scale, steps, 1)]
        outputs, self.last = tf.contrib.rnn.static_rnn(cell, inputs, self.initial_state)
        self.outputs = tf.stack(outputs)
"""
CONFIG = """
import tensorflow.compat.v1 as tf
from lm import tf1
from lm.config import Config

model = tf1.load("{path}")

def get_config():
    return Config(name="mine", hidden_size=4, num_steps=5, batch_size=4)

def state_shapes(config):
    return {{"c": [4], "h": [4]}}

def build_outputs(inputs_TB, state, context):
    x, (steps, rows) = tf.transpose(context.embed(inputs_TB), [1, 0, 2]), inputs_TB.shape
    before = tf.nn.rnn_cell.LSTMStateTuple(state["c"], state["h"])
    with tf1.fed(x, 2.0, zero_states=[(before,)]):
        built = model.Model(rows, steps, 4)
    return built.outputs, {{"c": built.last[0].c, "h": built.last[0].h}}
"""


def test_placeholders_and_states_are_fed(load):
    losses = train_and_evaluate(load(CONFIG, model=MODEL))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("x, 2.0,", "x, 2.0, 3.0,", "did not use the last 1 placeholders and 0 states"),
        ("[(before,)]", "[(before,), 1]", "did not use the last 0 placeholders and 1 states"),
        ("fed(x", "fed(x[0]", r"line 6, in build_outputs: .*placeholder x has the shape .*not \(5"),
    ],
)
def test_what_does_not_fit_is_an_error(load, before, after, message):
    with pytest.raises(UserError, match=message):
        train_and_evaluate(load(CONFIG.replace(before, after), model=MODEL))


@pytest.mark.parametrize(
    "result, message",
    [
        ("x + tf.placeholder(tf.float32, [])", "uses the placeholder .*_not_fed, .* to tf1.fed"),
        (
            "x * tf.get_variable('w', [tf.placeholder(tf.int32, [], name='units')])",
            "line 4, in build_outputs: .*units_not_fed.*; pass a value for each placeholder to tf1",
        ),
    ],
)
def test_a_placeholder_without_a_value_is_an_error(load, result, message):
    text = f"import tensorflow as tf\n\ndef build(x, is_training):\n    return {result}\n"
    with pytest.raises(UserError, match=message):
        train_and_evaluate(load(model=text))


DEFAULTS = """
import tensorflow as tf

def build(x):
    keep_prob = tf.placeholder_with_default(1.0, [], name="keep_prob")
    scale = tf.placeholder_with_default(1.0, [])
    return tf.nn.dropout(x, keep_prob) * scale
"""
WITH_DEFAULTS = PLAIN.replace(
    "return model.build(context.embed(inputs_TB), context.training), {{}}",
    "x = context.embed(inputs_TB)\n    with tf1.fed({fed}):\n        return model.build(x), {{}}",
)


def test_defaults_are_fed_by_name(load, caplog):
    def losses(fed):
        return train_and_evaluate(load(WITH_DEFAULTS.replace("{fed}", fed), model=DEFAULTS))

    named = "defaults={{'keep_prob': %s, 'PlaceholderWithDefault': 1.0}}"
    dropped = losses(named % 0.5)
    assert not caplog.text
    assert losses(named % 1.0) == losses("") != dropped
    assert "model.py, line 5: tf.placeholder_with_default keeps its default" in caplog.text
    assert "line 6" in caplog.text and "pass defaults={'keep_prob': value}" in caplog.text
    with pytest.raises(UserError, match=r"does not call tf.placeholder_with_default .* name keep"):
        losses("defaults={{'keep': 0.5}}")


NARROW = """
import tensorflow as tf

def build(x, is_training):
    words, flag = tf.placeholder(tf.uint8, [5, None], "words"), tf.placeholder(tf.bool, [])
    return x + tf.to_float(words)[..., tf.newaxis] + tf.to_float(flag)
"""


def test_values_that_do_not_fit_are_an_error(load):
    def losses(fed):
        text = WITH_DEFAULTS.replace("{fed}", fed).replace("build(x)", "build(x, True)")
        return train_and_evaluate(load(text, model=NARROW))

    assert losses("inputs_TB, True")
    with pytest.raises(UserError, match=r"model.py, line 5: placeholder words is uint8, and"):
        losses("inputs_TB + 250, 1")
    with pytest.raises(UserError, match=r"model.py, line 5: placeholder is bool, and a value"):
        losses("inputs_TB, 2")
