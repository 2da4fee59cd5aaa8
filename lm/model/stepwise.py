"""The network a word at a time, for any number of rows: generation, scoring, export.

In plain TensorFlow and float32, so that its graphs load where nothing of this project is installed.

Shapes: T time steps, B rows, L layers, H hidden units, V words. A state is float32
[B, L, 2, H]: output h and memory cell c of each layer; zeros are the empty state.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from lm.model.lstm import LSTMState
from lm.model.network import Weights, build_outputs
from lm.model.ops import PLAIN


def empty_state(weights: Weights, rows: tf.Tensor) -> tf.Tensor:
    """Return the state before any word, [B, L, 2, H], for a scalar number of rows."""
    hidden = weights.embedding.shape[1]
    return tf.zeros([rows, len(weights.layers), 2, hidden])


def next_word(weights: Weights, words_B: tf.Tensor, state: tf.Tensor) -> tuple:
    """Read one word in each row.

    Args:
      weights: The model.
      words_B: int32 ids.
      state: State before the word.

    Returns:
      The log-probabilities (natural) of the word after it, float32 [B, V], and the state.
    """
    parts = LSTMState._fields
    before = {
        f"{layer}/{part}": state[:, layer, index]
        for layer in range(len(weights.layers))
        for index, part in enumerate(parts)
    }
    outputs_TBH, after = build_outputs(weights, words_B[None], before, PLAIN, "float32")
    logits_BV = tf.nn.bias_add(tf.matmul(outputs_TBH[0], weights.softmax), weights.softmax_bias)
    layers = [
        tf.stack([after[f"{layer}/{part}"] for part in parts], axis=1)
        for layer in range(len(weights.layers))
    ]
    return tf.nn.log_softmax(logits_BV), tf.stack(layers, axis=1)


def target_log_probs(weights: Weights, inputs_TB: tf.Tensor, targets_TB: tf.Tensor) -> tf.Tensor:
    """Return the natural log-probability of each target, float32 [T, B].

    Each row starts with an empty state. One step's softmax is held at a time, so that memory
    does not grow with T * V.

    Args:
      weights: The model.
      inputs_TB: int32 ids of the words that are read.
      targets_TB: int32 ids of the words after them.
    """
    num_steps, rows = tf.shape(inputs_TB)[0], tf.shape(inputs_TB)[1]

    def step(t, state, found):
        log_probs_BV, state = next_word(weights, inputs_TB[t], state)
        at_targets = tf.gather(log_probs_BV, targets_TB[t], batch_dims=1)
        return t + 1, state, found.write(t, at_targets)

    _, _, found = tf.while_loop(
        lambda t, *_: t < num_steps,
        step,
        (0, empty_state(weights, rows), tf.TensorArray(tf.float32, num_steps)),
        shape_invariants=(
            tf.TensorShape([]),
            tf.TensorShape([None, len(weights.layers), 2, weights.embedding.shape[1]]),
            tf.TensorShape([]),
        ),
        back_prop=False,
    )
    return found.stack()
