"""Compiled CPU ops for the training step.

``python -m lm.kernels.build`` compiles the library, and ``available()`` says whether this process
can use it. Otherwise, lm/model/plain.py computes the same results with TensorFlow's own ops, except
for rounding.

Shapes: T time steps, B rows, H hidden units, G = 4H gates, V words, N = T * B tokens. The factors
of a product have the shapes [N, K] and [K, M]. All tensors are float32. The ``precision``
"bfloat16" rounds the factors of an op's matrix products, and of the products in its gradient, to
bfloat16. Everything else stays float32.

Results are bitwise identical on any number of ranks and threads. A result that depends on one row
(products, the recurrence, nll) does not depend on the other rows. Sums over tokens, in results and
in gradients, take the argument ``micro_batches``: for each micro-batch of the global batch, the
number of rows on this rank, such as (2, 3, 2, 3) for 10 rows. Each micro-batch, [T, rows], is
summed time step by time step. The sums of the micro-batches are then added as a binary tree, (s0 +
s1) + (s2 + s3). Therefore, the sum of the sums of two ranks equals the sum of one rank that has all
micro-batches. By default, all rows are one micro-batch.

Environment: LM_KERNELS=0 disables the ops. LM_KERNELS_ISA selects an instruction set
(build.INSTRUCTION_SETS) instead of the best set for this CPU.
"""

import math
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from lm.kernels.library import (
    arithmetic,
    available,
    description,
    is_missing,
    load,
    multiplies_bfloat16,
    subnormals_are_zero,
)

__all__ = [
    "add_to_average", "arithmetic", "available", "cluster_cross_entropy",
    "column_sums", "description", "dropout", "global_norm", "is_missing", "lstm_recurrence",
    "matmul", "multiplies_bfloat16", "rounded_product",
    "softmax_cross_entropy", "subnormals_are_zero",
]  # fmt: skip

_FEW_TOKENS = 256


def _product(a, b, bf16, transpose_b=False):
    """Multiply two matrices, each float32 or bfloat16. The result is float32."""
    return load().ops.lm_mat_mul(a, b, bf16=bf16, transpose_b=transpose_b)


def rounded_product(
    a: tf.Tensor, b: tf.Tensor, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """Multiply matrices, [.., N, K] by [.., K, M], whose factors are rounded to bfloat16.

    Differentiable. Both factors have the same static shape [..], which may be empty. All rows are
    one micro-batch.
    """
    is_batch = a.shape.rank > 2
    if transpose_a and (transpose_b or not is_batch):
        a, transpose_a = tf.linalg.matrix_transpose(a), False
    if not is_batch:
        return _product(a, b, bf16=True, transpose_b=transpose_b)
    return load().ops.lm_batch_mat_mul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


@tf.RegisterGradient("LmBatchMatMul")
def _batched_gradient(op, dc):
    a, b = op.inputs
    if op.get_attr("transpose_a"):
        return rounded_product(b, dc, transpose_b=True), rounded_product(a, dc)
    if op.get_attr("transpose_b"):
        return rounded_product(dc, b), rounded_product(dc, a, transpose_a=True)
    return rounded_product(dc, b, transpose_b=True), rounded_product(a, dc, transpose_a=True)


@tf.RegisterGradient("LmMatMul")
def _product_gradient(op, dc):
    a, b = op.inputs
    transpose_b, bf16 = op.get_attr("transpose_b"), op.get_attr("bf16")
    da = _product(dc, b, bf16, transpose_b=not transpose_b)
    return da, token_sum(dc, a, bf16, ()) if transpose_b else token_sum(a, dc, bf16, ())


def token_sum(a, b, bf16, micro_batches, ends=None):
    """Return the sum over tokens of the outer products of their rows in a and b."""
    ends = tf.zeros([0], tf.int64) if ends is None else ends
    return load().ops.lm_token_sum(a, b, ends, bf16=bf16, micro_batches=micro_batches)


def _transposed_token_sum(a, b, bf16, micro_batches, ends=None):
    """Return the transposed `token_sum(a, b)`. Both branches compute the same bits.

    With few tokens, the sum is faster than its transposition.
    """
    if (a.shape[0] or math.inf) <= _FEW_TOKENS:
        return token_sum(b, a, bf16, micro_batches, ends)
    return tf.transpose(token_sum(a, b, bf16, micro_batches, ends))


def matmul(
    a_NK: tf.Tensor,
    b_KM: tf.Tensor,
    precision: str = "float32",
    micro_batches: Sequence[int] = (),
    ends: tf.Tensor | None = None,
    transpose_b: bool = False,
) -> tf.Tensor:
    """Multiply the inputs of a layer by its weights, [K, M] or transposed. Differentiable.

    By default, the inputs are tokens at all time steps. If there are only some tokens, they must be
    ordered by micro-batch, and `ends` (int64) contains the end of each micro-batch. Micro-batches
    may be empty.
    """
    bf16 = precision == "bfloat16"

    @tf.custom_gradient
    def product(a, b):
        def gradient(dc):
            add = _transposed_token_sum if transpose_b else token_sum
            da = _product(dc, b, bf16, transpose_b=not transpose_b)
            return da, add(a, dc, bf16, micro_batches, ends)

        return _product(a, b, bf16, transpose_b), gradient

    return product(a_NK, b_KM)


def column_sums(x_NM: tf.Tensor, micro_batches: Sequence[int] = ()) -> tf.Tensor:
    """Return the sum over tokens, [M], without a gradient. It is the same on every CPU."""
    return load().ops.lm_column_sums(x_NM, micro_batches=micro_batches)


def lstm_recurrence(
    projected_TBG: tf.Tensor,
    bias_G: tf.Tensor,
    weights_HG: tf.Tensor,
    h0_BH: tf.Tensor,
    c0_BH: tf.Tensor,
    precision: str = "float32",
    micro_batches: Sequence[int] = (),
    keep_TB1: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Run an LSTM layer over a window, given its projected inputs x Wx, with gates i, j, f, o.

    z_t = projected_t + b + h_{t-1} W; c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(j);
    h_t = sigmoid(o) tanh(c_t) (Zaremba et al., arXiv:1409.2329, eq. 4). Differentiable with
    respect to all inputs. For truncated backpropagation, stop the gradient of the carried state.
    Before each step, h and c are multiplied by `keep_TB1`, which is 0 where the state starts anew,
    and otherwise 1.

    Returns:
      Outputs [T, B, H], and h and c after the last step, each [B, H].
    """
    bf16 = precision == "bfloat16"
    keep = tf.zeros([0]) if keep_TB1 is None else tf.squeeze(keep_TB1, axis=2)

    @tf.custom_gradient
    def recurrence(projected, bias, weights, h0, c0):
        h, c, gates = load().ops.lm_lstm(projected, bias, weights, h0, c0, keep, bf16=bf16)

        def gradient(dh, dh_last, dc_last):
            dz, dh0, dc0 = load().ops.lm_lstm_grad(
                weights, c, gates, dh, dh_last, dc_last, keep, bf16=bf16
            )
            hidden = tf.shape(h0)[1]
            dz_NG = tf.reshape(dz, [-1, 4 * hidden])
            # One product over all time steps, instead of one product per step.
            h_before = h[:-1] if keep_TB1 is None else h[:-1] * keep_TB1
            h_before_NH = tf.reshape(h_before, [-1, hidden])
            dweights = token_sum(h_before_NH, dz_NG, bf16, micro_batches)
            return dz, column_sums(dz_NG, micro_batches), dweights, dh0, dc0

        return (h[1:], h[-1], c[-1]), gradient

    return recurrence(projected_TBG, bias_G, weights_HG, h0_BH, c0_BH)


def dropout(x_TBH: tf.Tensor, keep_prob: float, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """Drop units, like `lm.model.plain.dropout`.

    Differentiable. The gradient computes the mask again, which is cheaper than storing it.
    """
    return load().ops.lm_dropout(x_TBH, key, counter, keep_prob=keep_prob, scale=1 / keep_prob)


@tf.RegisterGradient("LmDropout")
def _dropout_gradient(op, dy):
    _, key, counter = op.inputs
    attributes = {name: op.get_attr(name) for name in ("keep_prob", "scale")}
    return load().ops.lm_dropout(dy, key, counter, **attributes), None, None


def softmax_cross_entropy(
    hidden_NH: tf.Tensor,
    weights_HV: tf.Tensor,
    bias_V: tf.Tensor,
    targets_N: tf.Tensor,
    scale_N: tf.Tensor,
    precision: str = "float32",
    training: bool = True,
    micro_batches: Sequence[int] = (),
    transposed: bool = False,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Project to the vocabulary, and return the cross-entropy.

    loss = sum_n scale_n nll_n, with nll_n = -log softmax(hidden_n W + b)[target_n]. The pass that
    computes nll also computes scale (softmax - onehot) for the gradient. Therefore, the scale is an
    argument, and only the loss has a gradient: with respect to hidden, weights and bias.

    Args:
      hidden_NH: Outputs of the top layer.
      weights_HV: Weights of the projection, or [V, H] if `transposed`, like an embedding.
      bias_V: Bias of the projection.
      targets_N: int32 or int64 token IDs. An ID outside [0, V) raises InvalidArgumentError.
      scale_N: Factor of each token in the loss, such as 1 / batch_size, or 0 for padding.
      training: False omits the gradient.

    Returns:
      The loss, a scalar, and the nll of each token in nats, [N], without a gradient.
    """
    bf16 = precision == "bfloat16"
    targets_N, scale_N = tf.convert_to_tensor(targets_N), tf.convert_to_tensor(scale_N)
    dlogits_type = tf.bfloat16 if bf16 and training else tf.float32

    def cross_entropy(hidden, weights, bias):
        logits = _product(hidden, weights, bf16, transpose_b=transposed)
        nll, dlogits, dbias = load().ops.lm_softmax(
            logits, bias, targets_N, scale_N, D=dlogits_type, gradient=training,
            micro_batches=micro_batches,
        )  # fmt: skip
        loss = column_sums((scale_N * nll)[:, None], micro_batches)[0]

        def gradient(dloss, _):
            # Multiply the smallest factor by dloss: [N, H] instead of [N, V] or [H, V].
            add = _transposed_token_sum if transposed else token_sum
            dweights = add(dloss * hidden, dlogits, bf16, micro_batches)
            dhidden = dloss * _product(dlogits, weights, bf16, transpose_b=not transposed)
            return dhidden, dweights, dloss * dbias

        return (loss, nll), gradient

    inputs = [tf.convert_to_tensor(x) for x in (hidden_NH, weights_HV, bias_V)]
    if training:
        loss, nll_N = tf.custom_gradient(cross_entropy)(*inputs)
    else:
        (loss, nll_N), _ = cross_entropy(*inputs)
        loss = tf.stop_gradient(loss)
    return loss, tf.stop_gradient(nll_N)


def cluster_cross_entropy(
    hidden_NK: tf.Tensor,
    words_VK: tf.Tensor,
    targets_N: tf.Tensor,
    precision: str = "float32",
    ends: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the negative log-likelihood of each token, [N], over the words of a cluster.

    nll_n = -log softmax(hidden_n words^T)[target_n] in nats. Differentiable with respect to hidden
    and words. The logits are never stored. The gradient needs N * V * K / 256 numbers.

    Args:
      hidden_NK: The projected outputs. N may be zero.
      words_VK: The units of each word.
      targets_N: int32 or int64 indices of words. An invalid index raises InvalidArgumentError.
      ends: See `matmul`. The default is one micro-batch.
    """
    bf16 = precision == "bfloat16"
    if ends is None:
        ends = tf.shape(hidden_NK, out_type=tf.int64)[:1]

    @tf.custom_gradient
    def cross_entropy(hidden, words):
        nll, *sums = load().ops.lm_cluster(hidden, words, targets_N, bf16=bf16)

        def gradient(dnll):
            return load().ops.lm_cluster_grad(
                hidden, words, targets_N, *sums, dnll, ends, bf16=bf16
            )

        return nll, gradient

    return cross_entropy(hidden_NK, words_VK)


def global_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the square root of the sum of all squares, without a gradient.

    The result does not depend on the number of threads or the CPU, because all ranks must compute
    the same norm. The sum is float64, so it does not overflow if the norm fits into float32.
    """
    return load().ops.lm_global_norm(tensors)


def add_to_average(average: tf.Variable, weight: tf.Variable, share: tf.Tensor) -> tf.Operation:
    """Move an average towards a weight in one pass over both; see `lm.model.plain`."""
    return load().ops.lm_add_to_average(average.handle, weight.handle, share)
