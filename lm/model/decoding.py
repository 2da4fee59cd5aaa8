"""Graphs that read one word at a time, for any number of rows: generation, scoring, export.

They use plain TensorFlow in float32, so exported graphs load without this project.

Shapes: T time steps, B rows, V words, S numbers of a row's state. A state is float32 [B, S]: the
flattened parts of `state_shapes`, concatenated. The initial state is zero.
"""

from __future__ import annotations

import math

import tensorflow.compat.v1 as tf

from lm.model.context import Context
from lm.model.network import Network, State


def state_size(network: Network) -> int:
    """Return S, the size of a row's state."""
    return sum(map(math.prod, network.state_shapes.values()))


def next_word(
    network: Network, words_B: tf.Tensor, state_BS: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Read a word (int32 token ID) in each row.

    Returns:
      The natural log-probabilities of the following word, float32 [B, V], and the new state.
    """
    context = Context(network.config, network.vocab_size)
    outputs_or_logits_1BX, state_BS = _read(network, words_B, state_BS, context)
    return network.log_probs(outputs_or_logits_1BX[0], context), state_BS


def _read(
    network: Network, words_B: tf.Tensor, state_BS: tf.Tensor, context: Context
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the outputs or logits of the network [1, B, X], and the new state."""
    outputs_or_logits_1BX, after = network.build(words_B[None], _unpack(network, state_BS), context)
    parts = [
        tf.reshape(after[name], [-1, math.prod(shape)])
        for name, shape in network.state_shapes.items()
    ]
    return outputs_or_logits_1BX, tf.concat(parts, axis=1) if parts else state_BS


def _unpack(network: Network, state_BS: tf.Tensor) -> State:
    shapes, rows = network.state_shapes, state_BS.shape.as_list()[0]
    parts = tf.split(state_BS, [math.prod(s) for s in shapes.values()], axis=1) if shapes else []
    return {
        name: tf.reshape(part, [-1 if rows is None else rows, *shape])
        for (name, shape), part in zip(shapes.items(), parts)
    }


def target_log_probs(network: Network, inputs_TB: tf.Tensor, targets_TB: tf.Tensor) -> tf.Tensor:
    """Return the natural log-probability of each target, float32 [T, B].

    Each row starts with an empty state. The loop computes the softmax of one time step at a time,
    so the memory does not grow with T * V. Inputs and targets are int32 token IDs.
    """
    num_steps, size = tf.shape(inputs_TB)[0], state_size(network)
    known_rows = inputs_TB.shape.as_list()[1]
    rows = tf.shape(inputs_TB)[1] if known_rows is None else known_rows
    # Create the variables outside of the loop: initial values that are tensors must not be in it.
    next_word(network, inputs_TB[0], tf.zeros([rows, size]))

    def step(t, state_BS, found):
        context = Context(network.config, network.vocab_size)
        outputs_or_logits_1BX, state_BS = _read(network, inputs_TB[t], state_BS, context)
        scale_B = tf.zeros_like(targets_TB[t], tf.float32)  # weights of the loss, which is not used
        _, nll_B = network.cross_entropy(outputs_or_logits_1BX, targets_TB[t], scale_B, context)
        return t + 1, state_BS, found.write(t, -nll_B)

    state_shape = tf.TensorShape([known_rows, size])
    _, _, found = tf.while_loop(
        lambda t, *_: t < num_steps,
        step,
        (0, tf.zeros([rows, size]), tf.TensorArray(tf.float32, num_steps)),
        shape_invariants=(tf.TensorShape([]), state_shape, tf.TensorShape([])),
        back_prop=False,
    )
    return found.stack()
