"""Graphs that read one word at a time, for any number of rows: generation, scoring, export.

By default, they use plain TensorFlow in float32, so exported graphs load without this project.
With the compiled operations (`ops`), the results of a row do not depend on the other rows.

Shapes: T time steps, B rows, V words, S numbers of a row's state. A state is float32 [B, S]: the
flattened parts of `state_shapes`, concatenated, or the last words of a network with `reads_words`.
Integers are stored by their bits. The initial state is zero.
"""

import math
from collections.abc import Callable

import tensorflow.compat.v1 as tf

from lm.model.network import Network, State
from lm.model.ops import Ops, plain_ops

_PLAIN = plain_ops()


def state_size(network: Network) -> int:
    """Return S, the size of a row's state."""
    return network.reads_words or sum(map(math.prod, network.state_shapes.values()))


def next_word(
    network: Network, words_B: tf.Tensor, state_BS: tf.Tensor, ops: Ops = _PLAIN
) -> tuple[tf.Tensor, tf.Tensor]:
    """Read a word (int32 token ID) in each row.

    Return the natural log-probabilities of the following word, float32 [B, V], and the new state.
    """
    context = network.context(ops=ops)
    outputs_or_logits_BX, state_BS = _read(
        network, words_B, state_BS, lambda *window: network.build(*window, context)
    )
    return network.log_probs(outputs_or_logits_BX, context), state_BS


def next_loss(
    network: Network,
    words_B: tf.Tensor,
    targets_B: tf.Tensor,
    state_BS: tf.Tensor,
    ops: Ops = _PLAIN,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the losses of the words after `words_B` (float32 [B], in nats), and the new state."""

    def losses(inputs_TB: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        targets_TB = tf.tile(targets_B[None], [inputs_TB.shape[0], 1])
        return network.losses(inputs_TB, targets_TB, state, network.context(ops=ops))[1:]

    return _read(network, words_B, state_BS, losses)


def next_loss_from_prediction(
    network: Network, words_B: tf.Tensor, targets_B: tf.Tensor, state_BS: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Like `next_loss`, but from the result of `next_word`, even if the network defines losses."""
    log_probs_BV, state_BS = next_word(network, words_B, state_BS)
    return -tf.gather(log_probs_BV, targets_B, batch_dims=1), state_BS


def _read(
    network: Network,
    words_B: tf.Tensor,
    state_BS: tf.Tensor,
    build: Callable[[tf.Tensor, State], tuple[tf.Tensor, State]],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Read a word in each row, and return the results at the word, [B, ...], and the new state.

    `build` returns results [T, B, ...] and the new state for inputs [T, B] and a state.
    """
    if network.reads_words:
        return _read_again(network.reads_words, words_B, state_BS, build)
    results_1B, after = build(words_B[None], _unpack(network, state_BS))
    parts = [
        tf.reshape(tf.bitcast(after[name], tf.float32), [-1, math.prod(shape)])
        for name, shape in network.state_shapes.items()
    ]
    return results_1B[0], tf.concat(parts, axis=1) if parts else state_BS


def _read_again(
    num_words: int, words_B: tf.Tensor, state_BK: tf.Tensor, build: Callable
) -> tuple[tf.Tensor, tf.Tensor]:
    """Read the last K words as a window. The state is zeros, and then the IDs plus 1."""
    state_BK = tf.bitcast(state_BK, tf.int32)  # as float32, IDs above 2^24 would be rounded
    state_BK = tf.concat([state_BK[:, 1:], words_B[:, None] + 1], axis=1)
    count_B = tf.math.count_nonzero(state_BK, axis=1, dtype=tf.int32)
    # As in evaluation, the first word starts the window. The padding at the end has no effect.
    order_BK = (tf.range(num_words) - count_B[:, None]) % num_words
    ids_KB = tf.transpose(tf.gather(state_BK, order_BK, batch_dims=1)) - 1
    results_KB, _ = build(tf.nn.relu(ids_KB), {})
    last = tf.stack([count_B - 1, tf.range(tf.size(count_B))], axis=1)
    return tf.gather_nd(results_KB, last), tf.bitcast(state_BK, tf.float32)


def _unpack(network: Network, state_BS: tf.Tensor) -> State:
    shapes, rows = network.state_shapes, state_BS.shape.as_list()[0]
    parts = tf.split(state_BS, [math.prod(s) for s in shapes.values()], axis=1) if shapes else []
    return {
        name: tf.bitcast(tf.reshape(part, [-1 if rows is None else rows, *shape]), dtype)
        for (name, (shape, dtype)), part in zip(network.state_parts.items(), parts)
    }


def target_log_probs(
    network: Network, inputs_TB: tf.Tensor, targets_TB: tf.Tensor, read: Callable = next_loss
) -> tf.Tensor:
    """Return the natural log-probability of each target, float32 [T, B].

    Each row starts with an empty state. Inputs and targets are int32 token IDs. `read` is
    `next_loss` or `next_loss_from_prediction`.
    """
    known_rows = inputs_TB.shape.as_list()[1]
    rows = tf.shape(inputs_TB)[1] if known_rows is None else known_rows
    state_BS = tf.zeros([rows, state_size(network)])
    return continued_log_probs(network, inputs_TB, targets_TB, state_BS, read)[0]


def continued_log_probs(
    network: Network,
    inputs_TB: tf.Tensor,
    targets_TB: tf.Tensor,
    state_BS: tf.Tensor,
    read: Callable = next_loss,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the log-probabilities like `target_log_probs`, and the state after the targets.

    The loop computes the softmax of one time step at a time, so the memory does not grow with
    T * V.
    """
    num_steps = tf.shape(inputs_TB)[0]
    # Create the variables outside of the loop: initial values that are tensors must not be in it.
    read(network, inputs_TB[0], targets_TB[0], state_BS)

    def step(t, state_BS, found):
        losses_B, state_BS = read(network, inputs_TB[t], targets_TB[t], state_BS)
        return t + 1, state_BS, found.write(t, -losses_B)

    state_shape = tf.TensorShape([inputs_TB.shape[1], state_size(network)])
    _, after, found = tf.while_loop(
        lambda t, *_: t < num_steps,
        step,
        (0, state_BS, tf.TensorArray(tf.float32, num_steps)),
        shape_invariants=(tf.TensorShape([]), state_shape, tf.TensorShape([])),
        back_prop=False,
    )
    return found.stack(), after


def create_variables(network: Network) -> None:
    """Create the variables that only predictions use, so that checkpoints contain them."""
    with tf.name_scope("lm_predictions"):
        next_word(network, tf.zeros([1], tf.int32), tf.zeros([1, state_size(network)]))
