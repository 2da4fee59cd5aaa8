"""Graphs that read one word at a time, for any number of rows: generation, scoring, export.

By default, they use plain TensorFlow in float32, so exported graphs load without this project.
With the compiled operations (`ops`), the losses and the state of a row do not depend on the other
rows. TensorFlow's softmax rounds the log-probabilities of a row differently in different batches.

Shapes: T time steps, B rows, V words, S numbers of a row's state. A state is float32 [B, S]: the
flattened parts of `state_shapes`, concatenated, or the last K words of a network with
`reads_words`: zeros, and then the token IDs plus 1. Integers are stored by their bits. The initial
state is zero.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from lm.model.network import Built, Network, State
from lm.model.ops import Ops, plain_ops

# A function of a network, inputs [T, B], targets [T, B] and a state. It returns the losses [T, B]
# and the new state.
Losses = Callable[[Network, tf.Tensor, tf.Tensor, State], Built]

_PLAIN = plain_ops()


def state_size(network: Network) -> int:
    """Return S, the size of a row's state."""
    return network.reads_words or sum(map(math.prod, network.state_shapes.values()))


def state_of_words(words: Sequence[int], size: int) -> np.ndarray:
    """Return the state of a row of a network with `reads_words` after token IDs, float32 [S]."""
    state = np.zeros(size, np.int32)
    if last := words[-size:]:
        state[-len(last) :] = np.array(last) + 1
    return state.view(np.float32)


def window_losses(
    network: Network, inputs_TB: tf.Tensor, targets_TB: tf.Tensor, state: State, ops: Ops = _PLAIN
) -> Built:
    """Return the losses of the targets of a window (float32 [T, B], in nats), and the new state."""
    return network.losses(inputs_TB, targets_TB, state, network.context(ops=ops))[1:]


def window_losses_from_predictions(
    network: Network, inputs_TB: tf.Tensor, targets_TB: tf.Tensor, state: State
) -> Built:
    """Like `window_losses`, but from the predictions, even if the network defines losses."""
    context = network.context(ops=_PLAIN)
    outputs_or_logits_TBX, after = network.build(inputs_TB, state, context)
    units = outputs_or_logits_TBX.shape.as_list()[2]
    outputs_or_logits_NX = tf.reshape(outputs_or_logits_TBX, [-1, units])
    log_probs_NV = network.log_probs(outputs_or_logits_NX, context)
    losses_N = -tf.gather(log_probs_NV, tf.reshape(targets_TB, [-1]), batch_dims=1)
    return tf.reshape(losses_N, tf.shape(targets_TB)), after


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
    losses: Losses = window_losses,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the losses of the words after `words_B` (float32 [B], in nats), and the new state."""

    def build(inputs_TB: tf.Tensor, state: State) -> Built:
        targets_TB = tf.tile(targets_B[None], [inputs_TB.shape[0], 1])
        return losses(network, inputs_TB, targets_TB, state)

    return _read(network, words_B, state_BS, build)


def _read(
    network: Network,
    words_B: tf.Tensor,
    state_BS: tf.Tensor,
    build: Callable[[tf.Tensor, State], Built],
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
    """Read the last K words as a window."""
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


def target_log_probs(network: Network, inputs_TB: tf.Tensor, targets_TB: tf.Tensor) -> tf.Tensor:
    """Return the natural log-probability of each target, float32 [T, B].

    Each row starts with an empty state. Inputs and targets are int32 token IDs.
    """
    known_rows = inputs_TB.shape.as_list()[1]
    rows = tf.shape(inputs_TB)[1] if known_rows is None else known_rows
    state_BS = tf.zeros([rows, state_size(network)])
    return continued_log_probs(network, inputs_TB, targets_TB, state_BS)[0]


def continued_log_probs(
    network: Network,
    inputs_TB: tf.Tensor,
    targets_TB: tf.Tensor,
    state_BS: tf.Tensor,
    losses: Losses = window_losses,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the log-probabilities like `target_log_probs`, and the state after the targets.

    The loop computes the softmax of one time step at a time, so the memory does not grow with
    T * V. With `reads_words`, all rows must have read the same number of words.
    """
    num_steps, first = tf.shape(inputs_TB)[0], 0
    found = tf.TensorArray(tf.float32, num_steps)
    if network.reads_words:
        losses_TB, state_BS = _read_together(network, inputs_TB, targets_TB, state_BS, losses)
        first = tf.shape(losses_TB)[0]
        found = found.scatter(tf.range(first), -losses_TB)
    else:  # Create the variables outside of the loop, which must not contain initial values.
        next_loss(network, inputs_TB[0], targets_TB[0], state_BS, losses)

    def step(t, state_BS, found):
        losses_B, state_BS = next_loss(network, inputs_TB[t], targets_TB[t], state_BS, losses)
        # A network may call tf.global_variables_initializer() without using its result. TensorFlow
        # would run these initializers before the loop, and replace the trained weights.
        body = tf.get_default_graph()
        if body.building_function:  # False if a program called tf.disable_v2_behavior()
            body.function_captures.control.clear()
        return t + 1, state_BS, found.write(t, -losses_B)

    state_shape = tf.TensorShape([inputs_TB.shape[1], state_size(network)])
    _, after, found = tf.while_loop(
        lambda t, *_: t < num_steps,
        step,
        (first, state_BS, found),
        shape_invariants=(tf.TensorShape([]), state_shape, tf.TensorShape([])),
        back_prop=False,
    )
    return found.stack(), after


def _read_together(
    network: Network,
    inputs_TB: tf.Tensor,
    targets_TB: tf.Tensor,
    state_BK: tf.Tensor,
    losses: Losses,
) -> Built:
    """Read as many words as fit in a window of K words, and at least one.

    Return the losses of their targets, and the new state.
    """
    size = network.reads_words
    state_KB = tf.transpose(tf.bitcast(state_BK, tf.int32))
    num_known = tf.math.count_nonzero(tf.reduce_any(state_KB > 0, axis=1), dtype=tf.int32)
    num_known = tf.minimum(num_known, size - 1)
    inputs_TB = inputs_TB[: size - num_known]
    num_read = tf.shape(inputs_TB)[0]
    words_TB = tf.concat([state_KB[size - num_known :] - 1, inputs_TB], axis=0)
    num_unused = size - num_known - num_read
    inputs_KB = tf.pad(words_TB, [[0, num_unused], [0, 0]])
    targets_KB = tf.pad(targets_TB[:num_read], [[num_known, num_unused], [0, 0]])
    for window in (inputs_KB, targets_KB):
        window.set_shape([size, inputs_TB.shape[1]])
    losses_KB, _ = losses(network, inputs_KB, targets_KB, {})
    state_KB = tf.concat([state_KB, inputs_TB + 1], axis=0)[-size:]
    return losses_KB[num_known:][:num_read], tf.bitcast(tf.transpose(state_KB), tf.float32)


def create_variables(network: Network) -> None:
    """Create the variables that only predictions use, so that checkpoints contain them."""
    with tf.name_scope("lm_predictions"):
        next_word(network, tf.zeros([1], tf.int32), tf.zeros([1, state_size(network)]))
