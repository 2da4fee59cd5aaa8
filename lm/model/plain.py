"""The operations of a network in plain TensorFlow, for GPUs and exported graphs.

`lm/kernels` computes the same results faster on CPUs, and `lm/model/ops.py` chooses. Here, the
summation order is TensorFlow's own and does not depend on micro-batches.

Shapes: T time steps, B rows, H hidden units, G = 4H gates, V words, N = T * B tokens. The precision
"bfloat16" rounds the factors of all products, in results and in gradients, to bfloat16. Sums are
float32.
"""

import functools
from collections.abc import Callable, Sequence

import tensorflow.compat.v1 as tf


def matmul(
    a: tf.Tensor,
    b: tf.Tensor,
    precision: str,
    transpose_a: bool = False,
    ends: tf.Tensor | None = None,
    transpose_b: bool = False,
) -> tf.Tensor:
    """Multiply two float32 matrices. Differentiable. `ends` is not used.

    A product of bfloat16 tensors would also round the result. In float32, and even in the TF32 of
    GPUs, the product of two rounded factors is exact.
    """

    def product(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)

    return rounded(product, a, b) if precision == "bfloat16" else product(a, b)


def rounded(product: Callable[..., tf.Tensor], *factors: tf.Tensor) -> tf.Tensor:
    """Return a product whose factors are rounded to bfloat16. Its gradient rounds them too."""
    return _rounded_gradient(product(*map(_rounded_factor, factors)))


def _to_bfloat16(x):
    """Round float32 values to the nearest bfloat16 values, ties to even."""
    return tf.cast(tf.cast(x, tf.bfloat16), tf.float32)


@tf.custom_gradient
def _rounded_factor(x):
    return _to_bfloat16(x), lambda dx: dx  # the gradient is a sum, which stays float32


@tf.custom_gradient
def _rounded_gradient(x):
    return tf.identity(x), _to_bfloat16  # the gradient is a factor of more products


def column_sums(x_NM: tf.Tensor, micro_batches: Sequence[int] = ()) -> tf.Tensor:
    """Return the sum of the rows, [M]. The micro-batches are not used."""
    return tf.reduce_sum(x_NM, axis=0)


def lstm_recurrence(
    projected_TBG: tf.Tensor,
    bias: tf.Tensor,
    recurrent_weights: tf.Tensor,
    h_0: tf.Tensor,
    c_0: tf.Tensor,
    precision: str,
    keep_TB1: tf.Tensor | None = None,
    uses_xla: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Run an LSTM layer over a window; see `lm.kernels.lstm_recurrence`.

    With XLA, a GPU starts two kernels per time step instead of about a dozen.
    """
    forward, backward = _recurrence, _recurrence_gradient
    if uses_xla:
        forward, backward = _compiled_by_xla(forward), _compiled_by_xla(backward)

    @tf.custom_gradient
    def recurrence(projected_TBG, weights, h, c):
        steps = forward(projected_TBG, weights, h, c, keep_TB1, precision)
        h_steps, c_steps, _ = steps

        def gradient(*dh_and_dc):
            return tuple(backward(weights, *steps, *dh_and_dc, keep_TB1, precision))

        return (h_steps[1:], h_steps[-1], c_steps[-1]), gradient

    return recurrence(projected_TBG + bias, recurrent_weights, h_0, c_0)


@functools.cache  # XLA compiles equal layers only once if they share a function
def _compiled_by_xla(function):
    return tf.function(function, jit_compile=True, autograph=False)


def _recurrence(projected_TBG, weights, h, c, keep_TB1, precision):
    """Return the outputs and the cells of all steps and the initial ones, and the gates i, j, f, o.

    The shapes are [T + 1, B, H], [T + 1, B, H] and [T, 4, B, H].
    """
    h_steps, c_steps, gates = [h], [c], []
    for t, projected in enumerate(tf.unstack(projected_TBG)):
        if keep_TB1 is not None:
            h, c = h * keep_TB1[t], c * keep_TB1[t]
        z = projected + matmul(h, weights, precision)
        z_i, z_j, z_f, z_o = tf.split(z, 4, axis=1)
        i, j, f, o = tf.sigmoid(z_i), tf.tanh(z_j), tf.sigmoid(z_f), tf.sigmoid(z_o)
        c = f * c + i * j
        h = o * tf.tanh(c)
        h_steps.append(h)
        c_steps.append(c)
        gates.append(tf.stack([i, j, f, o]))
    return tf.stack(h_steps), tf.stack(c_steps), tf.stack(gates)


def _recurrence_gradient(
    recurrent_weights, h_steps, c_steps, gates, dh_TBH, dh_last, dc_last, keep_TB1, precision
):
    """Backpropagate through time. The weight gradient is ONE product over all time steps."""
    # A skinny product with a transposed weight is 5 to 10 times slower in oneDNN. The copy prevents
    # TensorFlow's optimizer from folding this transpose back into the products below.
    transposed_weights = tf.raw_ops.Snapshot(input=tf.transpose(recurrent_weights))
    h_before, c_before = h_steps[:-1], c_steps[:-1]
    if keep_TB1 is not None:
        h_before, c_before = h_before * keep_TB1, c_before * keep_TB1
    tanh_c = tf.tanh(c_steps[1:])
    dh, dc, dz_steps = dh_last, dc_last, []
    for t in reversed(range(dh_TBH.shape[0])):
        i, j, f, o = tf.unstack(gates[t])
        dh = dh + dh_TBH[t]
        dc = dc + dh * o * (1 - tf.square(tanh_c[t]))
        dz_i = dc * j * i * (1 - i)
        dz_j = dc * i * (1 - tf.square(j))
        dz_f = dc * c_before[t] * f * (1 - f)
        dz_o = dh * tanh_c[t] * o * (1 - o)
        dz = tf.concat([dz_i, dz_j, dz_f, dz_o], axis=1)
        dz_steps.append(dz)
        dc = dc * f
        dh = matmul(dz, transposed_weights, precision)
        if keep_TB1 is not None:
            dh, dc = dh * keep_TB1[t], dc * keep_TB1[t]
    dz_TBG = tf.stack(dz_steps[::-1])
    units = recurrent_weights.shape[0]
    h_before, dz_all = tf.reshape(h_before, [-1, units]), tf.reshape(dz_TBG, [-1, 4 * units])
    dweights = matmul(h_before, dz_all, precision, transpose_a=True)
    return dz_TBG, dweights, dh, dc


def dropout(x_TBH: tf.Tensor, keep_prob: float, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """Drop units with random numbers that the Philox generator computes from counters.

    The key is uint64 [1]. The counter is uint64 [2], the low and high half of the first counter.
    Each row owns ceil(T * H / 4) counters.
    """
    num_steps, rows, units = x_TBH.shape.as_list()
    numbers_per_row = 4 * -(-num_steps * units // 4)
    uniform = tf.raw_ops.StatelessRandomUniformV2(
        shape=[rows, numbers_per_row],
        key=key,
        counter=counter,
        alg=1,  # Philox, which yields the same numbers on all devices
        dtype=tf.float32,
    )
    uniform_BTH = tf.reshape(uniform[:, : num_steps * units], [rows, num_steps, units])
    uniform_TBH = tf.transpose(uniform_BTH, [1, 0, 2])
    return tf.where(uniform_TBH < keep_prob, x_TBH * (1 / keep_prob), tf.zeros_like(x_TBH))


def softmax_cross_entropy(
    hidden_NH: tf.Tensor,
    weights_HV: tf.Tensor,
    bias_V: tf.Tensor,
    targets_N: tf.Tensor,
    scale_N: tf.Tensor,
    precision: str,
    training: bool,
    transposed: bool = False,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Project to the vocabulary and return the cross-entropy; see `lm.kernels`.

    `training` is not used here.
    """
    if transposed:
        weights_HV = tf.transpose(weights_HV)
    logits_NV = tf.nn.bias_add(matmul(hidden_NH, weights_HV, precision), bias_V)
    return logits_cross_entropy(logits_NV, targets_N, scale_N)


def cluster_cross_entropy(
    hidden_NK: tf.Tensor,
    words_VK: tf.Tensor,
    targets_N: tf.Tensor,
    precision: str,
    ends: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the negative log-likelihood of each token; see `lm.kernels`. `ends` is not used."""
    logits_NV = matmul(hidden_NK, tf.transpose(words_VK), precision)
    return _cross_entropy(logits_NV, targets_N)


def logits_cross_entropy(
    logits_NV: tf.Tensor, targets_N: tf.Tensor, scale_N: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the loss and the negative log-likelihood of each token, given the logits."""
    nll_N = _cross_entropy(logits_NV, targets_N)
    return tf.reduce_sum(scale_N * nll_N), tf.stop_gradient(nll_N)


@tf.custom_gradient
def _cross_entropy(logits_NV, targets_N):
    """Return nll = log sum exp(logits) - logits[target], shifted by the maximum to avoid overflow.

    TensorFlow's own op takes twice as long for [400, 10000].
    """
    shifted_NV = logits_NV - tf.reduce_max(logits_NV, axis=1, keepdims=True)
    exp_NV = tf.exp(shifted_NV)
    sum_N1 = tf.reduce_sum(exp_NV, axis=1, keepdims=True)
    at_target = tf.stack([tf.range(tf.shape(targets_N)[0]), targets_N], axis=1)
    nll_N = tf.log(sum_N1[:, 0]) - tf.gather_nd(shifted_NV, at_target)

    def gradient(dnll_N):
        """Return d nll / d logits = softmax - onehot(target)."""
        scaled_NV = exp_NV * (dnll_N[:, None] / sum_N1)
        return tf.tensor_scatter_sub(scaled_NV, at_target, dnll_N), None

    return nll_N, gradient


def global_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the square root of the sum of all squares.

    The summation order depends on the threads or the GPU, so the last bit may differ between ranks.
    """
    return tf.linalg.global_norm(tensors)


def add_to_average(average: tf.Variable, weight: tf.Variable, share: tf.Tensor) -> tf.Operation:
    """Return an operation that sets the average to average + (weight - average) * share."""
    return average.assign_add((weight - average) * share).op
