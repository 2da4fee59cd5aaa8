"""A block of GPT-2 (Radford et al. 2019) whose state is the keys and values of the last words.

The scores have the terms of distances of ALiBi (Press et al. 2022, arXiv:2108.12409) and those of
Transformer-XL (Dai et al. 2019, arXiv:1901.02860, equation 4). Each word attends to the same number
of earlier words in windows and in single words.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config

HEADS, MEMORY = 2, 6


def get_config() -> Config:
    """Return a small config on the synthetic corpus."""
    return Config(
        name="attention", corpus="embedded", hidden_size=16, num_steps=7, batch_size=16,
        optimizer="adam", learning_rate=0.01, keep_prob=0.9,
    )  # fmt: skip


def state_shapes(config: Config) -> dict[str, list[int]]:
    """The state has keys, values, and whether they belong to a word."""
    heads = [HEADS, MEMORY, config.hidden_size // HEADS]
    return {"keys": heads, "values": heads, "is_word": [MEMORY]}


def build_outputs(inputs_TB, state, context):
    """Return the outputs [T, B, H] and the keys and values of the last words."""
    units = context.config.hidden_size
    x_BTH = tf.transpose(context.embed(inputs_TB), [1, 0, 2])
    is_word_BS = tf.concat([state["is_word"], tf.ones_like(x_BTH[:, :, 0])], axis=1)
    query, key, value = tf.split(_dense(_norm(x_BTH, "norm_1"), 3 * units, "attention"), 3, axis=2)
    key = tf.concat([state["keys"], _heads(key)], axis=2)
    value = tf.concat([state["values"], _heads(value)], axis=2)
    mixed_BTH = _attend(_heads(query), key, value, is_word_BS)
    x_BTH += context.dropout(_dense(mixed_BTH, units, "mixed"), context.config.keep_prob)
    inner = tf.nn.relu(_dense(_norm(x_BTH, "norm_2"), 4 * units, "inner"))
    x_BTH += context.dropout(_dense(inner, units, "outer"), context.config.keep_prob)
    after = {"keys": key[:, :, -MEMORY:], "values": value[:, :, -MEMORY:]}
    return tf.transpose(x_BTH, [1, 0, 2]), {**after, "is_word": is_word_BS[:, -MEMORY:]}


def _attend(query, key, value, is_word_BS):
    steps, units = query.shape.as_list()[2:]
    distance_TS = MEMORY + np.arange(steps)[:, None] - np.arange(MEMORY + steps)
    slopes = 2.0 ** -np.arange(1, HEADS + 1)[:, None, None]
    content, position = (tf.get_variable(name, [HEADS, 1, units]) for name in ("u", "v"))
    places = tf.get_variable("place", [HEADS * units, HEADS * units])
    place_AH = tf.tensordot(_sinusoids(HEADS * units), places, 1)
    place_ASh = tf.transpose(tf.reshape(place_AH, [-1, HEADS, units]), [1, 0, 2])
    place_ATSh = tf.gather(place_ASh, np.clip(distance_TS, 0, MEMORY), axis=1)
    score = tf.matmul(query + content, key, transpose_b=True)
    score += tf.einsum("bath,atsh->bats", query + position, place_ATSh)
    score *= units**-0.5
    score -= tf.constant(slopes * distance_TS, tf.float32)
    is_near_TS = ((distance_TS >= 0) & (distance_TS <= MEMORY)).astype(np.float32)
    score -= 1e9 * (1 - is_near_TS * is_word_BS[:, None, None])
    mixed = tf.transpose(tf.matmul(tf.nn.softmax(score), value), [0, 2, 1, 3])
    return tf.reshape(mixed, [-1, steps, HEADS * units])


def _sinusoids(units):
    """Return the encoding [distance, units] of the distances 0 to MEMORY."""
    angles = np.arange(MEMORY + 1)[:, None] / 10000 ** (np.arange(0, units, 2) / units)
    return tf.constant(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), tf.float32)


def _heads(x_BTH):
    steps, units = x_BTH.shape.as_list()[1:]
    return tf.transpose(tf.reshape(x_BTH, [-1, steps, HEADS, units // HEADS]), [0, 2, 1, 3])


def _dense(x_BTH, units, name):
    weights = tf.get_variable(f"{name}/weights", [x_BTH.shape[2], units])
    bias = tf.get_variable(f"{name}/bias", [units], initializer=tf.zeros_initializer())
    return tf.tensordot(x_BTH, weights, 1) + bias


def _norm(x_BTH, name):
    scale = tf.get_variable(name, [x_BTH.shape[2]], initializer=tf.ones_initializer())
    mean, variance = tf.nn.moments(x_BTH, [2], keepdims=True)
    return (x_BTH - mean) * tf.math.rsqrt(variance + 1e-5) * scale
