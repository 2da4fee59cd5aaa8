"""The built-in network: an embedding and LSTM layers (Zaremba et al. 2014).

It has the same interface as user-defined networks: `state_shapes` and `build_outputs`.

Shapes: T time steps, B rows, N = T * B, I inputs of a layer, H hidden units, G = 4H gates. Gates
are ordered i, j, f, o (input, candidate, forget, output), as in TensorFlow's BasicLSTMCell.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.model.context import Context
from lm.model.ops import Ops


class LSTMState(NamedTuple):
    """The recurrent state of one layer: output and memory cell, each [B, H]."""

    h: tf.Tensor
    c: tf.Tensor


class LSTMWeights(NamedTuple):
    """The weights of one layer: [I, 4H], [H, 4H] and [4H]."""

    input: tf.Tensor
    recurrent: tf.Tensor
    bias: tf.Tensor


def state_shapes(config: Config) -> dict[str, list[int]]:
    """Return the shapes of a row's recurrent state by name."""
    return {
        f"{layer}/{part}": [config.hidden_size]
        for layer in range(config.num_layers)
        for part in LSTMState._fields
    }


def build_outputs(
    inputs_TB: tf.Tensor, state: Mapping[str, tf.Tensor], context: Context
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Return the outputs of the top layer, [T, B, H], and the state after the window.

    T must be known, but B may be unknown. No gradient flows into the state before the window
    (truncated BPTT).
    """
    config, after = context.config, {}
    keep_TB1 = context.kept_state(inputs_TB)
    x_TBH = context.embed(inputs_TB)
    x_TBH = context.dropout(x_TBH, config.embedding_keep_prob or config.keep_prob)
    for layer in range(config.num_layers):
        before = LSTMState(*(state[f"{layer}/{part}"] for part in LSTMState._fields))
        weights = _layer_weights(layer, x_TBH.shape.as_list()[2], context)
        h_TBH, last = lstm_layer(x_TBH, before, weights, context.ops, keep_TB1)
        after.update({f"{layer}/{part}": value for part, value in last._asdict().items()})
        is_top = layer == config.num_layers - 1
        keep_prob = (is_top and config.output_keep_prob) or config.keep_prob
        x_TBH = context.dropout(h_TBH, keep_prob)
    context.penalize(h_TBH, x_TBH)
    return x_TBH, after


def _layer_weights(layer: int, num_inputs: int, context: Context) -> LSTMWeights:
    config, hidden = context.config, context.config.hidden_size
    with tf.variable_scope(f"lstm_{layer}"):
        weights = LSTMWeights(
            input=tf.get_variable("input_weights", [num_inputs, 4 * hidden]),
            recurrent=tf.get_variable("recurrent_weights", [hidden, 4 * hidden]),
            bias=tf.get_variable("bias", [4 * hidden], initializer=tf.zeros_initializer()),
        )
    if config.forget_bias:
        ones, forgets = [1.0] * hidden, [0.0, 0.0, config.forget_bias, 0.0]
        weights = weights._replace(bias=weights.bias + np.kron(forgets, ones).astype("f"))
    recurrent = context.drop_weights(weights.recurrent, config.recurrent_keep_prob)
    return weights._replace(recurrent=recurrent)


def lstm_layer(
    x_TBI: tf.Tensor,
    initial: LSTMState,
    weights: LSTMWeights,
    ops: Ops,
    keep_TB1: tf.Tensor | None = None,
) -> tuple[tf.Tensor, LSTMState]:
    """Run an LSTM layer without peepholes over a window (Zaremba et al. 2014, section 3).

    The input projection does not depend on the recurrence, so it is one product for all time
    steps. No gradient flows into the initial state (truncated BPTT). `lm.kernels` describes
    `keep_TB1`.
    """
    num_steps, _, num_inputs = x_TBI.shape.as_list()
    projected_NG = ops.matmul(tf.reshape(x_TBI, [-1, num_inputs]), weights.input)
    h_TBH, h_last, c_last = ops.recurrence(
        tf.reshape(projected_NG, [num_steps, -1, projected_NG.shape[1]]),
        weights.bias,
        weights.recurrent,
        tf.stop_gradient(initial.h),
        tf.stop_gradient(initial.c),
        keep_TB1=keep_TB1,
    )
    return h_TBH, LSTMState(h_last, c_last)
