"""Gated convolutions of words (Dauphin et al. 2017, arXiv:1612.08083) that are read as spellings.

The convolution of characters is that of Kim et al. (2016, arXiv:1508.06615). There is no state.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config

NUM_CHARACTERS, LENGTH, UNITS = 27, 12, 8
FILTERS = {1: 6, 3: 10}  # filters of characters by width
WIDTH = 3  # words that a layer reads


def get_config() -> Config:
    """Return a small config on the synthetic corpus."""
    return Config(
        name="convolution", corpus="embedded", hidden_size=16, num_layers=2, num_steps=10,
        batch_size=16, learning_rate=0.5, keep_prob=0.9,
    )  # fmt: skip


def reads_words(config: Config) -> int:
    """Each layer reads WIDTH - 1 more words."""
    return config.num_layers * (WIDTH - 1) + 1


def build_optimizer(learning_rate, context):
    """Return the optimizer of Dauphin et al., Nesterov's momentum."""
    return tf.train.MomentumOptimizer(learning_rate, 0.9, use_nesterov=True)


def transform_gradients(gradients, context):
    """Clip each gradient, and add noise (Neelakantan et al. 2015, arXiv:1511.06807)."""
    clipped = {name: tf.clip_by_norm(gradient, 1.0) for name, gradient in gradients.items()}
    for name, gradient in clipped.items():
        if isinstance(gradient, tf.Tensor):
            noise = tf.random.stateless_normal(gradient.shape, context.seed(), stddev=1e-3)
            clipped[name] = gradient + noise
    return clipped


def build_outputs(inputs_TB, state, context):
    """Return the outputs [T, B, H], and no state."""
    units = context.config.hidden_size
    x_TBH = context.embed(inputs_TB) + _read_characters(inputs_TB, context)
    x_BTH = tf.transpose(x_TBH, [1, 0, 2])
    for layer in range(context.config.num_layers):
        x_BTH = context.dropout(x_BTH, context.config.keep_prob)
        padded_BTH = tf.pad(x_BTH, [[0, 0], [WIDTH - 1, 0], [0, 0]])
        with tf.variable_scope(f"layer_{layer}"):
            filters = tf.get_variable("filters", [WIDTH, units, 2 * units])
            bias = tf.get_variable("bias", [2 * units], initializer=tf.zeros_initializer())
        y_BTG = tf.nn.conv1d(padded_BTH, filters, stride=1, padding="VALID") + bias
        linear_BTH, gate_BTH = tf.split(y_BTG, 2, axis=2)
        x_BTH += linear_BTH * tf.sigmoid(gate_BTH)
    return tf.transpose(x_BTH, [1, 0, 2]), {}


def _read_characters(inputs_TB, context):
    spelling = np.zeros([context.vocab_size, LENGTH], np.int32)
    for row, word in zip(spelling, context.words):
        row[: len(word)] = [1 + ord(character) % 26 for character in word[:LENGTH]]
    characters_TBL = tf.gather(tf.constant(spelling), inputs_TB)
    table = tf.get_variable("characters", [NUM_CHARACTERS, UNITS])
    x_NLU = tf.reshape(tf.gather(table, characters_TBL), [-1, LENGTH, UNITS])
    features = []
    for width, num_filters in FILTERS.items():
        filters = tf.get_variable(f"filters_{width}", [width, UNITS, num_filters])
        y_NLF = tf.nn.conv1d(x_NLU, filters, stride=1, padding="VALID")
        features.append(tf.reduce_max(tf.tanh(y_NLF), axis=1))
    return tf.reshape(tf.concat(features, axis=1), [inputs_TB.shape[0], -1, 16])
