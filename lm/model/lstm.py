"""The recurrent layer.

Shapes: T time steps, B rows, I inputs of a layer, H hidden units. Gates are ordered i, j, f, o
(input, candidate, forget, output), as in TensorFlow's BasicLSTMCell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

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


def lstm_layer(
    x_TBI: tf.Tensor,
    initial: LSTMState,
    weights: LSTMWeights,
    ops: Ops,
    precision: str,
    shares: Sequence[int] = (),
) -> tuple[tf.Tensor, LSTMState]:
    """Run one LSTM layer over a window (Zaremba et al. 2014, section 3; no peepholes).

    The input projection does not depend on the recurrence, so it is one product for all time
    steps; only the recurrent product is left inside.

    Args:
      x_TBI: Inputs.
      initial: State before the window; no gradient flows into it (truncated BPTT).
      weights: The layer's weights.
      ops: What computes it.
      precision: Of the products: float32 or bfloat16.
      shares: Of the sums over T and B in the gradients of the weights; see `Rows`.

    Returns:
      Outputs [T, B, H], and the state after the window.
    """
    num_steps, _, inputs = x_TBI.shape.as_list()
    projected = ops.matmul(tf.reshape(x_TBI, [-1, inputs]), weights.input, precision, shares)
    projected = ops.add_bias(projected, weights.bias, shares)
    h_TBH, h_last, c_last = ops.recurrence(
        tf.reshape(projected, [num_steps, -1, projected.shape[1]]),
        weights.recurrent,
        tf.stop_gradient(initial.h),
        tf.stop_gradient(initial.c),
        precision,
        shares,
    )
    return h_TBH, LSTMState(h_last, c_last)
