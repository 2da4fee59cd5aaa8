"""The language model's graph: embedding, LSTM layers, softmax (Zaremba et al. 2014).

Shapes: T time steps, B rows, H hidden units, V words, N = T * B tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.data.batches import Rows
from lm.model import lstm, softmax


class Weights(NamedTuple):
    """The trained variables."""

    embedding: tf.Variable  # [V, H]
    layers: Sequence[lstm.LSTMWeights]
    softmax: tf.Variable  # [H, V]
    softmax_bias: tf.Variable  # [V]


class Model(NamedTuple):
    """What to feed and run to push a window through the network."""

    inputs_ph: tf.Tensor  # int32 [T, B]
    targets_ph: tf.Tensor  # int32 [T, B]
    weights_ph: tf.Tensor  # float32 [T, B]: 1 for tokens that count (the default), or 0
    loss: tf.Tensor  # float32 scalar: nll_sum / batch_size, to be differentiated
    nll_sum: tf.Tensor  # float32 scalar: summed over the tokens that count, in nats
    keep_state_op: tf.Operation  # carries the recurrent state over to the next window
    reset_state_op: tf.Operation  # forgets it
    nll_N: tf.Tensor  # float32 [N]: of each token, in nats


def build_weights(config: Config, vocab_size: int) -> Weights:
    """Create the variables, uniform in +-init_scale; the biases of the LSTM start at 0.

    The numbers depend on the seed and the variable's name only, so all ranks start equal.

    Args:
      config: The model's sizes and seed.
      vocab_size: V.
    """

    def variable(name: str, shape: list[int], zero: bool = False) -> tf.Variable:
        if zero:
            value = tf.zeros(shape)
        else:
            seed = [config.seed, zlib.crc32(name.encode())]
            value = tf.random.stateless_uniform(shape, seed, -config.init_scale, config.init_scale)
        return tf.get_variable(name, initializer=value, use_resource=True)

    hidden = config.hidden_size
    return Weights(
        embedding=variable("embedding", [vocab_size, hidden]),
        layers=[
            lstm.LSTMWeights(
                input=variable(f"lstm_{layer}/input_weights", [hidden, 4 * hidden]),
                recurrent=variable(f"lstm_{layer}/recurrent_weights", [hidden, 4 * hidden]),
                bias=variable(f"lstm_{layer}/bias", [4 * hidden], zero=True),
            )
            for layer in range(config.num_layers)
        ],
        softmax=variable("softmax/weights", [hidden, vocab_size]),
        softmax_bias=variable("softmax/bias", [vocab_size]),
    )


def build_model(
    config: Config, weights: Weights, rows: Rows, name: str, dropout_step: tf.Tensor = None
) -> Model:
    """Build the network for windows of `rows.count` rows and `num_steps` time steps.

    The recurrent state lives in local variables: each rank has that of its own rows, and a
    broadcast of the global variables leaves it alone.

    Args:
      config: The model's settings.
      weights: Made by `build_weights`; may be shared by several models.
      rows: Which rows of the global batch are fed.
      name: Scope of the model's ops and local variables.
      dropout_step: int64 scalar, the global step that keys the dropout masks; None builds the
        model without dropout, for evaluation.

    Returns:
      The model's placeholders, loss and state ops.
    """

    def drop(x_TBH: tf.Tensor, site: int) -> tf.Tensor:
        if dropout_step is None:
            return x_TBH
        return lstm.dropout(x_TBH, config.keep_prob, config.seed, dropout_step, site, rows.first)

    with tf.variable_scope(name):
        shape = [config.num_steps, rows.count]
        inputs_ph = tf.placeholder(tf.int32, shape, "inputs")
        targets_ph = tf.placeholder(tf.int32, shape, "targets")
        weights_ph = tf.placeholder_with_default(tf.ones(shape), shape, "weights")

        x_TBH = drop(tf.gather(weights.embedding, inputs_ph), site=0)
        before, after = [], []
        for index, layer_weights in enumerate(weights.layers):
            before.append(_build_state(config, rows.count, index))
            x_TBH, state = lstm.lstm_layer(x_TBH, before[-1], layer_weights, config.precision)
            after.append(state)
            x_TBH = drop(x_TBH, site=index + 1)

        weights_N = tf.reshape(weights_ph, [-1])
        # Divided by the GLOBAL batch size: the losses of all ranks add up to the loss, so that
        # shares of different sizes weigh as they should.
        loss, nll_N = softmax.cross_entropy(
            tf.reshape(x_TBH, [-1, config.hidden_size]),
            weights.softmax,
            weights.softmax_bias,
            tf.reshape(targets_ph, [-1]),
            weights_N / config.batch_size,
            config.precision,
            training=dropout_step is not None,
        )
        nll_sum = tf.reduce_sum(nll_N * weights_N)
        # The state must not be overwritten before everything that reads it has run.
        with tf.control_dependencies([nll_sum]):
            keep_state_op = _assign_states(before, after)
        reset_state_op = _assign_states(before, tf.nest.map_structure(tf.zeros_like, before))
    return Model(
        inputs_ph, targets_ph, weights_ph, loss, nll_sum, keep_state_op, reset_state_op, nll_N
    )


def _build_state(config: Config, rows: int, layer: int) -> lstm.LSTMState:
    def variable(name: str) -> tf.Variable:
        return tf.get_variable(
            f"state_{layer}/{name}",
            [rows, config.hidden_size],
            initializer=tf.zeros_initializer(),
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
            trainable=False,
            use_resource=True,
        )

    return lstm.LSTMState(h=variable("h"), c=variable("c"))


def _assign_states(variables, values) -> tf.Operation:
    pairs = zip(tf.nest.flatten(variables), tf.nest.flatten(values))
    return tf.group(*[variable.assign(value).op for variable, value in pairs])
