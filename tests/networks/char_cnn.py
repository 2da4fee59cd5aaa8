"""A network that reads the spelling of words (Kim et al. 2016, arXiv:1508.06615)."""

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


def build_outputs(inputs_TB, state, context):
    """Return the features [T, B, F] of the last word, and no state."""
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
    shape = [inputs_TB.shape[0], -1, sum(WIDTHS.values())]
    x_TBF = tf.reshape(tf.concat(features, axis=1), shape)
    return context.dropout(x_TBF, context.config.keep_prob), {}
