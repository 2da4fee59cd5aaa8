"""Networks with the cells and layers of TF 1.x."""

import pytest
import tensorflow.compat.v1 as tf

from lm.errors import UserError
from tests.unit.model.networks import CLASSIC, HEADER, needs_tf_keras, train_and_evaluate


@needs_tf_keras
def test_layers_of_classic_code_need_scopes_of_their_own(load):
    layer = (
        "    cell = tf.nn.rnn_cell.BasicLSTMCell(config.hidden_size)\n"
        "    outputs, _ = tf.nn.dynamic_rnn(cell, outputs, dtype=tf.float32, time_major=True%s)\n"
    )
    layers = [layer % scope for scope in ("", ", scope='other'", "")]
    losses = train_and_evaluate(load(CLASSIC.replace("    # ---\n", "".join(layers[:2]))))
    assert losses[-1] < losses[0]
    with pytest.raises(UserError, match=r"variable rnn/basic_lstm_cell/kernel is created twice"):
        train_and_evaluate(load(CLASSIC.replace("    # ---\n", "".join(layers))))


@needs_tf_keras
def test_an_error_in_a_user_defined_cell_names_its_line(load):
    cell = (
        "class Cell(tf.nn.rnn_cell.BasicLSTMCell):\n"
        "    def call(self, inputs, state):\n"
        "        tf.matmul(inputs, state[0])\n"
        "        return super().call(inputs, state)\n\n"
    )
    text = CLASSIC.replace("def get_config", cell + "def get_config")
    text = text.replace("[tf.nn.rnn_cell.BasicLSTMCell(", "[Cell(")
    line = text.splitlines().index("        tf.matmul(inputs, state[0])") + 1
    message = rf"mine.py, line {line}, in build_outputs: ValueError: Dim"
    with pytest.raises(UserError, match=message):
        train_and_evaluate(load(text))


def test_missing_tf_keras_is_an_error_that_names_the_package(load, monkeypatch):
    def gone(*arguments, **options):
        raise AttributeError("`BasicLSTMCell` is not available with Keras 3.")

    file = load(CLASSIC)
    monkeypatch.setattr("tensorflow.compat.v1.nn.rnn_cell.BasicLSTMCell", gone, raising=False)
    minor = ".".join(tf.__version__.split(".")[:2])
    missing = rf"pip install --no-deps 'tf_keras=={minor}\.\*'\)?$"
    with pytest.raises(UserError, match=missing):
        train_and_evaluate(file)
    with pytest.raises(UserError, match=rf", line \d+: AttributeError: .*{missing}"):
        load(HEADER + "tf.nn.rnn_cell.BasicLSTMCell()\n")
