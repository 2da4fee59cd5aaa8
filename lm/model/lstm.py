"""The recurrent layer, with a hand-written backward pass, and its dropout.

Shapes: T time steps, B rows, I inputs of a layer, H hidden units. Gates are ordered i, j, f, o
(input, candidate, forget, output), as in TensorFlow's BasicLSTMCell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from lm import kernels
from lm.model.ops import product


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
    x_TBI: tf.Tensor, initial: LSTMState, weights: LSTMWeights, precision: str
) -> tuple[tf.Tensor, LSTMState]:
    """Run one LSTM layer over a window (Zaremba et al. 2014, section 3; no peepholes).

    The input projection does not depend on the recurrence, so it is one product for all time
    steps; only the recurrent product is left inside.

    Args:
      x_TBI: Inputs.
      initial: State before the window; no gradient flows into it (truncated BPTT).
      weights: The layer's weights.
      precision: Of the products: float32 or bfloat16.

    Returns:
      Outputs [T, B, H], and the state after the window.
    """
    num_steps, rows, inputs = x_TBI.shape.as_list()
    project = kernels.matmul if kernels.available() else product
    projected = project(tf.reshape(x_TBI, [num_steps * rows, inputs]), weights.input, precision)
    projected = tf.nn.bias_add(projected, weights.bias)
    projected_TBG = tf.reshape(projected, [num_steps, rows, projected.shape[1]])
    recurrence = kernels.lstm_recurrence if kernels.available() else _recurrence
    h_TBH, h_last, c_last = recurrence(
        projected_TBG,
        weights.recurrent,
        tf.stop_gradient(initial.h),
        tf.stop_gradient(initial.c),
        precision,
    )
    return h_TBH, LSTMState(h_last, c_last)


def _recurrence(projected_TBG, recurrent_weights, h_0, c_0, precision):
    @tf.custom_gradient
    def with_gradient(*inputs):
        return _recurrence_and_gradient(*inputs, precision)

    return with_gradient(projected_TBG, recurrent_weights, h_0, c_0)


def _recurrence_and_gradient(projected_TBG, recurrent_weights, h_0, c_0, precision):
    """z_t = projected_t + h_{t-1} W;  c_t = f c_{t-1} + i j;  h_t = o tanh(c_t)."""
    steps = []
    h, c = h_0, c_0
    for projected in tf.unstack(projected_TBG):
        z_i, z_j, z_f, z_o = tf.split(
            projected + product(h, recurrent_weights, precision), 4, axis=1
        )
        i, j, f, o = tf.sigmoid(z_i), tf.tanh(z_j), tf.sigmoid(z_f), tf.sigmoid(z_o)
        step = _Step(h_before=h, c_before=c, i=i, j=j, f=f, o=o, tanh_c=None)
        c = f * c + i * j
        tanh_c = tf.tanh(c)
        h = o * tanh_c
        steps.append(step._replace(tanh_c=tanh_c))
    h_TBH = tf.stack([step.h_before for step in steps[1:]] + [h])

    def gradient(dh_TBH, dh_last, dc_last):
        return _recurrence_gradient(steps, recurrent_weights, dh_TBH, dh_last, dc_last, precision)

    return (h_TBH, h, c), gradient


class _Step(NamedTuple):
    h_before: tf.Tensor
    c_before: tf.Tensor
    i: tf.Tensor
    j: tf.Tensor
    f: tf.Tensor
    o: tf.Tensor
    tanh_c: tf.Tensor


def _recurrence_gradient(
    steps: Sequence[_Step], recurrent_weights, dh_TBH, dh_last, dc_last, precision
):
    """Back-propagate through time; the weight gradient is ONE product over all time steps."""
    # A skinny product with a transposed weight is 5 to 10 times slower in oneDNN; the copy
    # keeps TensorFlow's optimizer from folding this transpose back into the products below.
    transposed_weights = tf.raw_ops.Snapshot(input=tf.transpose(recurrent_weights))
    dh_step, dc = tf.unstack(dh_TBH), dc_last
    dh = dh_last
    dz_steps = []
    for step, dh_above in zip(reversed(steps), reversed(dh_step)):
        dh = dh + dh_above
        dc = dc + dh * step.o * (1 - tf.square(step.tanh_c))
        dz = tf.concat(
            [
                dc * step.j * step.i * (1 - step.i),
                dc * step.i * (1 - tf.square(step.j)),
                dc * step.c_before * step.f * (1 - step.f),
                dh * step.tanh_c * step.o * (1 - step.o),
            ],
            axis=1,
        )
        dz_steps.append(dz)
        dc = dc * step.f
        dh = product(dz, transposed_weights, precision)
    dz_TBG = tf.stack(dz_steps[::-1])
    h_before = tf.concat([step.h_before for step in steps], axis=0)
    dweights = product(h_before, tf.concat(dz_steps[::-1], axis=0), precision, transpose_a=True)
    return dz_TBG, dweights, dh, dc


def dropout(
    x_TBH: tf.Tensor, keep_prob: float, seed: int, step: tf.Tensor, site: int, first_row: int
) -> tf.Tensor:
    """Drop units with masks that depend on (seed, step, site, global row) alone.

    So the same rows get the same masks however many ranks share them, and after a resume. Each
    row owns a range of the counters of the Philox generator (Salmon et al. 2011, "Parallel
    random numbers: as easy as 1, 2, 3"), whose every counter gives four numbers.

    Args:
      x_TBH: Activations.
      keep_prob: Probability of keeping a unit; kept ones are divided by it.
      seed: The run's seed.
      step: int64 scalar, the global step.
      site: Which dropout of the model this is; the sites get independent masks.
      first_row: Global index of the first of the B rows.

    Returns:
      [T, B, H].
    """
    if keep_prob == 1.0:
        return x_TBH
    num_steps, rows, units = x_TBH.shape.as_list()
    counters_per_row = -(-num_steps * units // 4)
    key = tf.constant([seed], tf.uint64)
    counter = tf.stack(
        [
            tf.constant(first_row * counters_per_row, tf.uint64),
            tf.cast(step, tf.uint64) * _MAX_SITES + site,
        ]
    )
    if kernels.available():
        return kernels.dropout(x_TBH, keep_prob, key, counter)
    uniform = tf.raw_ops.StatelessRandomUniformV2(
        shape=[rows, 4 * counters_per_row],
        key=key,
        counter=counter,
        alg=1,  # Philox, whose numbers are the same on every device
        dtype=tf.float32,
    )
    uniform_BTH = tf.reshape(uniform[:, : num_steps * units], [rows, num_steps, units])
    uniform_TBH = tf.transpose(uniform_BTH, [1, 0, 2])
    return tf.where(uniform_TBH < keep_prob, x_TBH * (1 / keep_prob), tf.zeros_like(x_TBH))


_MAX_SITES = 1024  # of a step; with more, the last would get the masks of the next step's first
