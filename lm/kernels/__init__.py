"""Compiled CPU ops for the training step.

``python -m lm.kernels.build`` compiles the library; ``available()`` says whether it can be used
here. Where it cannot, lm/model/plain.py computes the same from stock ops.

Shapes: T time steps, B rows, H hidden units, G = 4H gates, V words, N = T * B tokens. All tensors
are float32. ``precision`` "bfloat16" rounds the factors of matrix products, and nothing else, to
bfloat16; sums, gates, softmax statistics and gradients stay float32.

The same bits on any number of ranks and threads: what depends on one row alone (products, the
recurrence, nll) does not depend on which rows are beside it. Sums over tokens take ``shares``, the
rows that this rank has of each share of the global batch, such as (2, 3, 2, 3) of 10: the tokens
of a share, [T, rows], are summed time step by time step, and the shares' sums as a binary tree,
(s0 + s1) + (s2 + s3). So the sum of two ranks' sums is that of one rank with all their shares. No
shares: all rows are one.

Environment: LM_KERNELS=0 switches the ops off; LM_KERNELS_ISA takes a lesser one
of build.INSTRUCTION_SETS than the CPU's best.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from lm.kernels.library import (
    available,
    description,
    is_missing,
    load,
    multiplies_bfloat16,
    subnormals_are_zero,
)

__all__ = [
    "add_bias", "add_to_average", "available", "column_sums", "description", "dropout",
    "global_norm", "is_missing", "lstm_recurrence", "matmul", "multiplies_bfloat16",
    "softmax_cross_entropy", "subnormals_are_zero",
]  # fmt: skip


def _ops():
    if not available():
        raise RuntimeError(description())
    return load().ops


def _is_bfloat16(precision: str) -> bool:
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision is {precision!r}, not 'float32' or 'bfloat16'")
    return precision == "bfloat16"


def _product(a, b, bf16, transpose_b=False):
    """Multiply two matrices, each float32 or bfloat16; float32 result."""
    return _ops().lm_mat_mul(a, b, bf16=bf16, transpose_b=transpose_b)


def _token_sum(a, b, bf16, shares):
    """Return the sum over tokens of the outer products of their rows in a and b."""
    return _ops().lm_token_sum(a, b, bf16=bf16, shares=shares)


def matmul(
    a_NK: tf.Tensor, b_KM: tf.Tensor, precision: str = "float32", shares: Sequence[int] = ()
) -> tf.Tensor:
    """Multiply two matrices. Differentiable.

    Args:
      a_NK: The left factor, such as a layer's inputs at all time steps.
      b_KM: The right factor, such as its weights.
      precision: Of this product and of the two of its gradient.
      shares: Of the sum over N in the gradient of b.

    Returns:
      [N, M].
    """
    bf16 = _is_bfloat16(precision)

    @tf.custom_gradient
    def product(a, b):
        def gradient(dc):
            return _product(dc, b, bf16, transpose_b=True), _token_sum(a, dc, bf16, shares)

        return _product(a, b, bf16), gradient

    return product(a_NK, b_KM)


def add_bias(x_NM: tf.Tensor, bias_M: tf.Tensor, shares: Sequence[int] = ()) -> tf.Tensor:
    """Add a bias to each row. Differentiable.

    Args:
      x_NM: A row for each token.
      bias_M: The bias.
      shares: Of the sum over N in its gradient.

    Returns:
      [N, M].
    """

    @tf.custom_gradient
    def add(x, bias):
        return tf.nn.bias_add(x, bias), lambda dy: (dy, column_sums(dy, shares))

    return add(x_NM, bias_M)


def column_sums(x_NM: tf.Tensor, shares: Sequence[int] = ()) -> tf.Tensor:
    """Sum over tokens; for float32 the same bits on every CPU.

    Args:
      x_NM: A row for each token, [T, rows of all shares] of them.
      shares: Of the sum.

    Returns:
      [M], without a gradient.
    """
    return _ops().lm_column_sums(x_NM, shares=shares)


def lstm_recurrence(
    projected_TBG: tf.Tensor,
    weights_HG: tf.Tensor,
    h0_BH: tf.Tensor,
    c0_BH: tf.Tensor,
    precision: str = "float32",
    shares: Sequence[int] = (),
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Run an LSTM layer over a window, given its input projection; gates i, j, f, o.

    z_t = projected_t + h_{t-1} W; c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(j);
    h_t = sigmoid(o) tanh(c_t) (Zaremba et al., arXiv:1409.2329, eq. 4). Differentiable in all
    inputs; stop the gradient of a carried state for truncated backpropagation.

    Args:
      projected_TBG: x Wx + b, [T, B, 4H].
      weights_HG: Recurrent weights, [H, 4H].
      h0_BH: Output before the window.
      c0_BH: Memory cell before the window.
      precision: Of the recurrent products.
      shares: Of the sum over T and B in the gradient of the weights.

    Returns:
      Outputs [T, B, H], and h and c after the last step, each [B, H].
    """
    h, h_last, c_last, _, _ = _ops().lm_lstm(
        projected_TBG, weights_HG, h0_BH, c0_BH, bf16=_is_bfloat16(precision), shares=shares
    )
    return h, h_last, c_last


@tf.RegisterGradient("LmLstm")
def _lstm_gradient(op, dh, dh_last, dc_last, *_):
    _, weights, h0, c0 = op.inputs
    h, _, _, c, gates = op.outputs
    bf16 = op.get_attr("bf16")
    dz, dh0, dc0 = _ops().lm_lstm_grad(weights, c0, c, gates, dh, dh_last, dc_last, bf16=bf16)
    hidden = tf.shape(h0)[1]
    h_before = tf.reshape(tf.concat([h0[None], h[:-1]], 0), [-1, hidden])
    # One product over all time steps, not one a step.
    dweights = _token_sum(h_before, tf.reshape(dz, [-1, 4 * hidden]), bf16, op.get_attr("shares"))
    return dz, dweights, dh0, dc0


def dropout(x_TBH: tf.Tensor, keep_prob: float, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """Drop units by the numbers that StatelessRandomUniformV2 makes of the counters.

    Differentiable; the gradient makes the mask again, which costs less than keeping it.

    Args:
      x_TBH: Activations.
      keep_prob: Probability of keeping a unit; kept ones are divided by it.
      key: uint64 [1], of the Philox generator.
      counter: uint64 [2], low and high half of the first one; each row owns ceil(T * H / 4).

    Returns:
      [T, B, H].
    """
    return _ops().lm_dropout(x_TBH, key, counter, keep_prob=keep_prob, scale=1 / keep_prob)


@tf.RegisterGradient("LmDropout")
def _dropout_gradient(op, dy):
    _, key, counter = op.inputs
    attributes = {name: op.get_attr(name) for name in ("keep_prob", "scale")}
    return _ops().lm_dropout(dy, key, counter, **attributes), None, None


def softmax_cross_entropy(
    hidden_NH: tf.Tensor,
    weights_HV: tf.Tensor,
    bias_V: tf.Tensor,
    targets_N: tf.Tensor,
    scale_N: tf.Tensor,
    precision: str = "float32",
    training: bool = True,
    shares: Sequence[int] = (),
    transposed: bool = False,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Project to the vocabulary; return the cross-entropy, its gradient made on the way.

    loss = sum_n scale_n nll_n, with nll_n = -log softmax(hidden_n W + b)[target_n]. The pass that
    computes nll also leaves scale (softmax - onehot) for the gradient. That is why the scale goes
    in here and only `loss` has a gradient: with respect to hidden, weights and bias.

    Args:
      hidden_NH: Outputs of the top layer.
      weights_HV: Projection.
      bias_V: Its bias.
      targets_N: int32 or int64 ids; one outside [0, V) raises InvalidArgumentError.
      scale_N: Weight of each token in the loss, such as 1 / batch_size, or 0 for padding.
      precision: Of the three products.
      training: False saves the work for the gradient; `loss` then has none.
      shares: Of the sums over N: the loss, and the gradients of weights and bias.
      transposed: Whether the weights are [V, H], as an embedding is.

    Returns:
      The loss, a scalar, and the nll of each token in nats, [N], without a gradient.
    """
    bf16 = _is_bfloat16(precision)
    targets_N, scale_N = tf.convert_to_tensor(targets_N), tf.convert_to_tensor(scale_N)
    dlogits_type = tf.bfloat16 if bf16 and training else tf.float32

    def cross_entropy(hidden, weights, bias):
        logits = _product(hidden, weights, bf16, transpose_b=transposed)
        nll, dlogits, dbias = _ops().lm_softmax(
            logits, bias, targets_N, scale_N, D=dlogits_type, gradient=training, shares=shares
        )
        loss = column_sums((scale_N * nll)[:, None], shares)[0]

        def gradient(dloss, _):
            # dloss, mostly 1, goes in where that is cheap: into [N, H], not [N, V] or [H, V].
            dweights = _token_sum(dloss * hidden, dlogits, bf16, shares)
            if transposed:  # takes less time than the sum with its factors exchanged
                dweights = tf.transpose(dweights)
            dhidden = dloss * _product(dlogits, weights, bf16, transpose_b=not transposed)
            return dhidden, dweights, dloss * dbias

        return (loss, nll), gradient

    inputs = [tf.convert_to_tensor(x) for x in (hidden_NH, weights_HV, bias_V)]
    if training:
        loss, nll = tf.custom_gradient(cross_entropy)(*inputs)
    else:
        (loss, nll), _ = cross_entropy(*inputs)
        loss = tf.stop_gradient(loss)
    return loss, tf.stop_gradient(nll)


def global_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the square root of the sum of all squares; its bits depend on the numbers alone.

    Not on threads, nor on the CPU: what every rank computes for itself must be the same on all.
    Summed in float64, so that it overflows only where the norm itself is no float32.

    Args:
      tensors: float32, of any shapes.

    Returns:
      A scalar, without a gradient.
    """
    return _ops().lm_global_norm(tensors)


def add_to_average(average: tf.Variable, weight: tf.Variable, share: tf.Tensor) -> tf.Operation:
    """Move an average towards a weight, in one pass over both; see `lm/model/plain.py`."""
    return _ops().lm_add_to_average(average.handle, weight.handle, share)
