"""A layer of Transformer-XL (Dai et al. 2019, arXiv:1901.02860), whose memory is the state.

Each word attends to the memory's number of earlier words, in windows and in single words.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config

HEADS, MEMORY = 2, 6


def get_config() -> Config:
    """Return a small config on the synthetic corpus."""
    return Config(
        name="transformer_xl", corpus="embedded", hidden_size=16, num_steps=7, batch_size=16,
        optimizer="adam", learning_rate=0.01, keep_prob=0.9,
    )  # fmt: skip


def state_shapes(config: Config) -> dict[str, list[int]]:
    """The state has the inputs of the layer before the window. They are zero before the text."""
    return {"memory": [MEMORY, config.hidden_size]}


def build_outputs(inputs_TB, state, context):
    """Return the outputs [T, B, H] and the memory after the window."""
    units, keep_prob = context.config.hidden_size, context.config.keep_prob
    x_BTH = tf.transpose(context.dropout(context.embed(inputs_TB), keep_prob), [1, 0, 2])
    seen_BSH = tf.concat([state["memory"], x_BTH], axis=1)
    x_BTH += context.dropout(_attend(x_BTH, seen_BSH, units), keep_prob)
    inner = tf.nn.relu(_dense(x_BTH, 2 * units, "inner"))
    x_BTH += _dense(inner, units, "outer")
    return tf.transpose(x_BTH, [1, 0, 2]), {"memory": seen_BSH[:, -MEMORY:]}


def _attend(x_BTH, seen_BSH, units):
    """Attend to the memory and the window; the scores are equation 4 of the paper."""
    steps, size = x_BTH.shape.as_list()[1], units // HEADS
    distance_TS = MEMORY + np.arange(steps)[:, None] - np.arange(MEMORY + steps)
    content, position = (tf.get_variable(name, [HEADS, 1, size]) for name in ("u", "v"))
    query = _heads(_dense(x_BTH, units, "query"))
    key, value = (_heads(_dense(seen_BSH, units, name)) for name in ("key", "value"))
    place_SAh = tf.reshape(
        tf.tensordot(_sinusoids(units), tf.get_variable("place", [units, units]), 1),
        [MEMORY + 1, HEADS, size],
    )
    place_ATSh = tf.transpose(tf.gather(place_SAh, np.clip(distance_TS, 0, MEMORY)), [2, 0, 1, 3])
    score = tf.matmul(query + content, key, transpose_b=True)
    score += tf.einsum("bath,atsh->bats", query + position, place_ATSh)
    is_near_TS = ((distance_TS >= 0) & (distance_TS <= MEMORY)).astype(np.float32)
    weights = tf.nn.softmax(score * size**-0.5 - 1e9 * (1 - is_near_TS))
    mixed = tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3])
    return _dense(tf.reshape(mixed, [-1, steps, units]), units, "mixed")


def _sinusoids(units):
    """Return the encoding [distance, units] of the distances 0 to MEMORY."""
    angles = np.arange(MEMORY + 1)[:, None] / 10000 ** (np.arange(0, units, 2) / units)
    return tf.constant(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), tf.float32)


def _heads(x_BTH):
    steps, units = x_BTH.shape.as_list()[1:]
    return tf.transpose(tf.reshape(x_BTH, [-1, steps, HEADS, units // HEADS]), [0, 2, 1, 3])


def _dense(x_BTH, units, name):
    weights = tf.get_variable(name, [x_BTH.shape[2], units])
    return tf.tensordot(x_BTH, weights, 1)
