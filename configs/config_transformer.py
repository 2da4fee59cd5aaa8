"""Transformer: causal self-attention over the last num_steps words, in stock operations.

python -m lm.train --config configs/config_transformer.py

The recurrent state contains the inputs of each layer in the previous window, as in Transformer-XL
(Dai et al. 2019, arXiv:1901.02860). Every word attends to the same number of previous words, so
windows and single words lead to the same perplexity. The settings of Adam are from Vaswani et al.
(2017, arXiv:1706.03762).

With --nomemory, each word attends only to the previous words in its window, as in GPT. The network
then has no recurrent state, so --window_order shuffled is possible.

Shapes: T time steps, B rows, H hidden units, A heads, M words in memory (0 or D), S = M + T.
D is num_steps, the largest distance to which a word attends.
"""

import dataclasses

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config, option


@dataclasses.dataclass(frozen=True)
class TransformerConfig(Config):
    """The settings of this network. Each new field becomes a flag."""

    num_heads: int = option(4, "number of attention heads; must divide hidden_size", low=1)
    memory: bool = option(True, "attend to the previous window, which is the recurrent state")


def get_config():
    """Return a small model for PTB."""
    return TransformerConfig(
        name="transformer", hidden_size=200, num_layers=3, num_steps=35, keep_prob=0.8,
        init_scale=0.05, optimizer="adam", adam_beta2=0.98, adam_epsilon=1e-9, learning_rate=1e-3,
        warmup_steps=400, lr_decay=0.7, max_grad_norm=5.0, num_epochs=13,
    )  # fmt: skip


def state_shapes(config):
    """Return the shapes of each layer's inputs and of a mask, which is 1 for valid inputs."""
    if not config.memory:
        return {}
    shape = [config.num_steps, config.hidden_size]
    return {"is_there": shape[:1], **{f"layer_{i}": shape for i in range(config.num_layers)}}


def reads_words(config):
    """Return the number of words to read again in generation, or None with a memory."""
    return None if config.memory else config.num_steps


def build_outputs(inputs_TB, state, context):
    """Build the layers (Vaswani et al. 2017, with normalization first) for a window."""
    config, T = context.config, inputs_TB.shape.as_list()[0]
    x_BTH = tf.transpose(context.embed(inputs_TB), [1, 0, 2]) * config.hidden_size**0.5
    x_BTH = _dropout(x_BTH, context)
    after = {}

    def seen(name, now):
        """Return the values in the previous window, if there is a memory, and in this window."""
        if state:
            now = tf.concat([state[name], now], 1)
            after[name] = now[:, T:]
        return now

    is_there_BS = seen("is_there", tf.ones_like(x_BTH[:, :, 0]))
    for layer in range(config.num_layers):
        with tf.variable_scope(f"layer_{layer}"):
            seen_BSH = seen(f"layer_{layer}", x_BTH)
            x_BTH += _dropout(_attention(x_BTH, seen_BSH, is_there_BS, config), context)
            inner = tf.nn.relu(_dense(_normalize(x_BTH, "norm"), 4 * config.hidden_size, "inner"))
            x_BTH += _dropout(_dense(inner, config.hidden_size, "outer"), context)
    return tf.transpose(_normalize(x_BTH, "norm"), [1, 0, 2]), after


def _attention(x_BTH, seen_BSH, is_there_BS, config):
    (T, H), S = x_BTH.shape.as_list()[1:], seen_BSH.shape.as_list()[1]
    M, A, D = S - T, config.num_heads, config.num_steps
    seen_BSH = _normalize(seen_BSH, "norm_attention")

    def heads(y, name):
        y = tf.reshape(_dense(y, H, name), [-1, y.shape[1], A, H // A])
        return tf.transpose(y, [0, 2, 1, 3])

    query, key, value = heads(seen_BSH[:, M:], "q"), heads(seen_BSH, "k"), heads(seen_BSH, "v")
    score_BATS = tf.matmul(query, key, transpose_b=True) * (H // A) ** -0.5
    # Each head learns a bias for each distance from 0 to D. More distant words are masked.
    back_TS = M + np.arange(T)[:, None] - np.arange(S)
    is_near_TS = (back_TS >= 0) & (back_TS <= D)
    distance_DA = tf.get_variable("distance", [D + 1, A])
    bias_TSA = tf.gather(distance_DA, np.clip(back_TS, 0, D).astype(np.int32))
    score_BATS += tf.transpose(bias_TSA, [2, 0, 1])
    may_see_B1TS = is_near_TS.astype(np.float32) * is_there_BS[:, None, None]
    mixed_BATh = tf.matmul(tf.nn.softmax(score_BATS - 1e9 * (1 - may_see_B1TS)), value)
    return _dense(tf.reshape(tf.transpose(mixed_BATh, [0, 2, 1, 3]), [-1, T, H]), H, "mixed")


def _dense(x, units, name):
    weights = tf.get_variable(f"{name}/weights", [x.shape.as_list()[2], units])
    bias = tf.get_variable(f"{name}/bias", [units], initializer=tf.zeros_initializer())
    flat = tf.matmul(tf.reshape(x, [-1, x.shape[2]]), weights) + bias
    return tf.reshape(flat, [-1, x.shape[1], units])


def _normalize(x, name):
    scale = tf.get_variable(f"{name}/scale", [x.shape[2]], initializer=tf.ones_initializer())
    mean, variance = tf.nn.moments(x, [2], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-6) * scale


def _dropout(x_BTH, context):
    return context.dropout(x_BTH, context.config.keep_prob)
