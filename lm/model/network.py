"""The network: embedding, LSTM layers, softmax (Zaremba et al. 2014).

Shapes: T time steps, B rows, H hidden units, V words.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple

import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.model.lstm import LSTMState, LSTMWeights, lstm_layer
from lm.model.ops import Ops
from lm.model.shape import weight_shapes

State = Mapping[str, tf.Tensor]  # by name, float32 [B, H]: what passes from window to window


class Weights(NamedTuple):
    """The trained variables."""

    embedding: tf.Variable  # [V, H]
    layers: Sequence[LSTMWeights]
    softmax: tf.Variable  # [H, V]
    softmax_bias: tf.Variable  # [V]


def build_weights(config: Config, vocab_size: int) -> Weights:
    """Create the variables, uniform in +-init_scale; the biases of the LSTM start at 0.

    The numbers depend on the seed and the variable's name only, so all ranks start equal.

    Args:
      config: The model's sizes and seed.
      vocab_size: V.
    """

    def variable(name: str, shape: Sequence[int]) -> tf.Variable:
        if name.startswith("lstm") and name.endswith("bias"):
            value = tf.zeros(shape)
        else:
            seed = [config.seed, zlib.crc32(name.encode())]
            value = tf.random.stateless_uniform(shape, seed, -config.init_scale, config.init_scale)
        return tf.get_variable(name, initializer=value, use_resource=True)

    made = {
        name: variable(name, shape) for name, shape in weight_shapes(config, vocab_size).items()
    }
    return Weights(
        embedding=made["embedding"],
        layers=[
            LSTMWeights(
                input=made[f"lstm_{layer}/input_weights"],
                recurrent=made[f"lstm_{layer}/recurrent_weights"],
                bias=made[f"lstm_{layer}/bias"],
            )
            for layer in range(config.num_layers)
        ],
        softmax=made["softmax/weights"],
        softmax_bias=made["softmax/bias"],
    )


def state_shapes(config: Config) -> dict[str, list[int]]:
    """Return the shapes of a row's recurrent state, by name; it is zero at the start."""
    return {
        f"{layer}/{part}": [config.hidden_size]
        for layer in range(config.num_layers)
        for part in LSTMState._fields
    }


def build_outputs(
    weights: Weights,
    inputs_TB: tf.Tensor,
    state: State,
    ops: Ops,
    precision: str,
    drop: Callable[[tf.Tensor, int], tf.Tensor] = lambda x_TBH, site: x_TBH,
    shares: Sequence[int] = (),
) -> tuple[tf.Tensor, State]:
    """Run the network over a window, up to its top layer.

    Args:
      weights: From `build_weights`.
      inputs_TB: int32 ids; T must be known, B need not.
      state: Before the window; no gradient flows into it (truncated BPTT).
      ops: What computes it.
      precision: Of the products: float32 or bfloat16.
      drop: Applied to the embedding (site 0) and to the output of each layer (site 1, ...).
      shares: Of the sums over T and B in the gradients of the weights; see `Rows`.

    Returns:
      The outputs of the top layer, [T, B, H], and the state after the window.
    """
    # Row by row, for the sake of the gradient: its list of words is then in the order of the global
    # rows, and the same when the ranks' lists are put one after the other.
    # (Not a transpose: for int32 oneDNN complains of it on stderr.)
    inputs_BT = tf.stack(tf.unstack(inputs_TB), axis=1)
    x_BTH = tf.gather(weights.embedding, inputs_BT)
    x_TBH = drop(tf.transpose(x_BTH, [1, 0, 2]), 0)
    after = {}
    for layer, layer_weights in enumerate(weights.layers):
        before = LSTMState(*(state[f"{layer}/{part}"] for part in LSTMState._fields))
        x_TBH, last = lstm_layer(x_TBH, before, layer_weights, ops, precision, shares)
        after.update({f"{layer}/{part}": value for part, value in last._asdict().items()})
        x_TBH = drop(x_TBH, layer + 1)
    return x_TBH, after
