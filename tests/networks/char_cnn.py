"""A network that reads the spelling of words (Kim et al. 2016, arXiv:1508.06615), and a GRU."""

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config

NUM_CHARACTERS, LENGTH, UNITS = 27, 12, 8
WIDTHS = {1: 12, 2: 16, 3: 24}  # filters by width


def get_config() -> Config:
    """Return a small config on the synthetic corpus."""
    return Config(
        name="char_cnn", corpus="embedded", hidden_size=24, num_steps=7, batch_size=16,
        learning_rate=0.5, keep_prob=0.9,
    )  # fmt: skip


def state_shapes(config: Config) -> dict[str, list[int]]:
    """The state has the output of the GRU after the last word."""
    return {"h": [config.hidden_size]}


def build_outputs(inputs_TB, state, context):
    """Return the outputs [T, B, H] and the state after the window."""
    spelling = np.zeros([context.vocab_size, LENGTH], np.int32)
    for row, word in zip(spelling, context.words):
        row[: len(word)] = [1 + ord(character) % 26 for character in word[:LENGTH]]
    characters_TBL = tf.gather(tf.constant(spelling), inputs_TB)
    table = tf.get_variable("characters", [NUM_CHARACTERS, UNITS])
    x_NLU = tf.reshape(tf.gather(table, characters_TBL), [-1, LENGTH, UNITS])
    features = []
    for width, num_filters in WIDTHS.items():
        filters = tf.get_variable(f"filters_{width}", [width, UNITS, num_filters])
        y_NLF = tf.nn.conv1d(x_NLU, filters, stride=1, padding="VALID")
        features.append(tf.reduce_max(tf.tanh(y_NLF), axis=1))
    x_NF = _highway(tf.concat(features, axis=1))
    x_TBF = tf.reshape(x_NF, [inputs_TB.shape[0], -1, sum(WIDTHS.values())])
    return _gru(context.dropout(x_TBF, context.config.keep_prob), state["h"])


def _highway(x_NF):
    """Mix the features with a gated transformation of them (Srivastava et al. 2015)."""
    size = x_NF.shape[1]
    with tf.variable_scope("highway"):
        weights = tf.get_variable("weights", [size, 2 * size])
        bias = tf.get_variable("bias", [2 * size], initializer=tf.zeros_initializer())
    y_NF, gate_NF = tf.split(tf.matmul(x_NF, weights) + bias, 2, axis=1)
    gate_NF = tf.sigmoid(gate_NF - 2)
    return gate_NF * tf.nn.relu(y_NF) + (1 - gate_NF) * x_NF


def _gru(x_TBF, h_BH):
    units, num_inputs, outputs = h_BH.shape[1], x_TBF.shape[2], []
    with tf.variable_scope("gru"):
        w_gates = tf.get_variable("gates", [num_inputs + units, 2 * units])
        w_new = tf.get_variable("candidate", [num_inputs + units, units])
    for x_BF in tf.unstack(x_TBF):
        reset, update = tf.split(tf.sigmoid(tf.concat([x_BF, h_BH], 1) @ w_gates), 2, axis=1)
        new = tf.tanh(tf.concat([x_BF, reset * h_BH], 1) @ w_new)
        h_BH = update * h_BH + (1 - update) * new
        outputs.append(h_BH)
    return tf.stack(outputs), {"h": h_BH}
