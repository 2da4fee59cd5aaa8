"""Cells of `tf.contrib.rnn` that neither TensorFlow 2 nor tf_keras nor tf_slim has."""

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

_RNNCell = tf.nn.rnn_cell.RNNCell
_State = tf.nn.rnn_cell.LSTMStateTuple


class LayerNormBasicLSTMCell(_RNNCell):
    """An LSTM with layer normalization (Ba et al. 2016) and recurrent dropout.

    Dropout applies to the new candidate values (Semeniuta et al. 2016, arXiv:1603.05118).
    """

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        input_size: None = None,
        activation: Callable = tf.tanh,
        layer_norm: bool = True,
        norm_gain: float = 1.0,
        norm_shift: float = 0.0,
        dropout_keep_prob: Any = 1.0,
        dropout_prob_seed: int | None = None,
        reuse: bool | None = None,
    ):
        super().__init__(_reuse=reuse)
        self._units, self._forget_bias, self._activation = num_units, forget_bias, activation
        self._norms, self._gain, self._shift = layer_norm, norm_gain, norm_shift
        self._keep_prob = dropout_keep_prob

    @property
    def state_size(self) -> Any:
        return _State(self._units, self._units)

    @property
    def output_size(self) -> int:
        return self._units

    def call(self, inputs: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        c, h = state
        joined = tf.concat([inputs, h], 1)
        product = joined @ tf.get_variable("kernel", [joined.shape[-1], 4 * self._units])
        if not self._norms:
            # TF 1.x uses the default initializer here, not zeros.
            product += tf.get_variable("bias", [4 * self._units])
        names = "input", "transform", "forget", "output"
        i, j, f, o = map(self._normalized, tf.split(product, 4, 1), names)
        candidate = tf.nn.dropout(self._activation(j), self._keep_prob)
        c = self._normalized(
            c * tf.sigmoid(f + self._forget_bias) + tf.sigmoid(i) * candidate, "state"
        )
        h = self._activation(c) * tf.sigmoid(o)
        return h, _State(c, h)

    def _normalized(self, x_BH: tf.Tensor, name: str) -> tf.Tensor:
        if not self._norms:
            return x_BH
        with tf.variable_scope(name):
            gamma, beta = (
                tf.get_variable(part, [self._units], initializer=tf.constant_initializer(value))
                for part, value in (("gamma", self._gain), ("beta", self._shift))
            )
        mean, variance = tf.nn.moments(x_BH, [1], keepdims=True)
        return tf.nn.batch_normalization(x_BH, mean, variance, beta, gamma, 1e-12)


class NASCell(_RNNCell):
    """The cell that neural architecture search found on PTB (Zoph & Le 2017, appendix)."""

    def __init__(
        self,
        num_units: int,
        num_proj: int | None = None,
        use_biases: bool = False,
        reuse: bool | None = None,
        use_bias: bool = False,  # the name in the last versions of TF 1.x
    ):
        super().__init__(_reuse=reuse)
        self._units, self._num_proj, self._use_biases = num_units, num_proj, use_biases or use_bias

    @property
    def state_size(self) -> Any:
        return _State(self._units, self.output_size)

    @property
    def output_size(self) -> int:
        return self._num_proj or self._units

    def call(self, inputs: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        c, m = state
        width = 8 * self._units
        of_m = m @ tf.get_variable("recurrent_kernel", [self.output_size, width])
        of_x = inputs @ tf.get_variable("kernel", [inputs.shape[-1], width])
        if self._use_biases:
            of_m += tf.get_variable("bias", [width], initializer=tf.zeros_initializer())
        m, x = tf.split(of_m, 8, 1), tf.split(of_x, 8, 1)
        first = tf.sigmoid(x[0] + m[0]) * tf.nn.relu(x[1] + m[1])
        second = tf.sigmoid(x[2] + m[2]) + tf.nn.relu(x[3] * m[3])
        third = tf.tanh(x[4] + m[4]) * tf.sigmoid(x[5] + m[5])
        fourth = tf.tanh(x[6] + m[6]) + tf.sigmoid(x[7] + m[7])
        c = tf.tanh(tf.tanh(first) + c) * tf.tanh(second)
        m = tf.tanh(c * tf.tanh(tf.tanh(third) + tf.sigmoid(fourth)))
        if self._num_proj:
            m = m @ tf.get_variable("projection_weights", [self._units, self._num_proj])
        return m, _State(c, m)
