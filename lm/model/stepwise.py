"""The model's forward pass for any number of rows and words, in plain TensorFlow operations.

Training and evaluation run windows of a fixed size (`lm/model/network.py`), with compiled ops
where there are any. Generation, scoring and export need one word at a time, sentences of any
length, and graphs that load where nothing of this project is installed: that is this module.

Shapes: T time steps, B rows, L layers, H hidden units, V words. A state is float32
[B, L, 2, H]: output h and memory cell c of each layer; zeros are the empty state.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint.variables import load_variables
from lm.errors import UserError
from lm.model.lstm import LSTMWeights
from lm.model.network import Weights


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
    x_BH = tf.gather(weights.embedding, words_B)
    states = []
    for layer, layer_weights in enumerate(weights.layers):
        h_BH, c_BH = _cell(x_BH, state[:, layer, 0], state[:, layer, 1], layer_weights)
        states.append(tf.stack([h_BH, c_BH], axis=1))
        x_BH = h_BH
    logits_BV = tf.nn.bias_add(tf.matmul(x_BH, weights.softmax), weights.softmax_bias)
    return tf.nn.log_softmax(logits_BV), tf.stack(states, axis=1)


def _cell(x_BH, h_BH, c_BH, weights: LSTMWeights) -> tuple:
    """The step of `lm/model/lstm.py`, without a gradient."""
    z = tf.matmul(x_BH, weights.input) + tf.matmul(h_BH, weights.recurrent) + weights.bias
    z_i, z_j, z_f, z_o = tf.split(z, 4, axis=1)
    c_BH = tf.sigmoid(z_f) * c_BH + tf.sigmoid(z_i) * tf.tanh(z_j)
    return tf.sigmoid(z_o) * tf.tanh(c_BH), c_BH


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


def restore(session: tf.Session, weights: Mapping[str, np.ndarray]) -> None:
    """Give the graph's variables the weights of a checkpoint.

    Args:
      session: Session of the graph.
      weights: Variable name -> value.

    Raises:
      UserError: A variable of the graph is missing or has another shape.
    """
    missing = [v.op.name for v in tf.global_variables() if v.op.name not in weights]
    if missing:
        raise UserError(f"the checkpoint has no {missing[0]}, which the run's config asks for")
    load_variables(session, weights)
