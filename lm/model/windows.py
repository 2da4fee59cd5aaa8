"""The network over windows of a fixed size, for training and evaluation: feeds, loss, state.

Shapes: T time steps, B rows, H hidden units, N = T * B tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import tensorflow.compat.v1 as tf

from lm.data.batches import Rows
from lm.model.context import Context, Cut
from lm.model.network import Network, State
from lm.model.ops import fastest


class Model(NamedTuple):
    """What to feed and run to push a window through the network."""

    inputs_ph: tf.Tensor  # int32 [T, B]
    targets_ph: tf.Tensor  # int32 [T, B]
    loss: tf.Tensor  # float32 scalar, to be differentiated: nll_sum / batch_size, and penalties
    nll_sum: tf.Tensor  # float32 scalar: summed over the tokens, in nats
    nll_N: tf.Tensor  # float32 [N]: of each token, in nats
    keep_state_op: tf.Operation  # carries the recurrent state over to the next window
    reset_state_op: tf.Operation  # forgets it
    cuts: Sequence[Cut]  # uses of weights whose gradients are exchanged by themselves


def build_model(
    network: Network, rows: Rows, name: str, dropout_step: Optional[tf.Tensor] = None
) -> Model:
    """Build the network for windows of `rows.count` rows and `num_steps` time steps.

    The recurrent state lives in local variables: each rank has that of its own rows, and a
    broadcast of the global variables leaves it alone.

    Args:
      network: Of the current graph; may be shared by several models.
      rows: Which rows of the global batch are fed.
      name: Scope of the model's ops and local variables.
      dropout_step: int64 scalar, the global step that keys the dropout masks; None builds the
        model without dropout, for evaluation.

    Returns:
      The model's placeholders, loss and state ops.

    Raises:
      UserError: The network of the config file cannot be used.
    """
    config = network.config
    ops = fastest(config.precision, rows.micro_batches)
    context = Context(config, network.vocab_size, ops, rows, dropout_step)
    with tf.variable_scope(name):
        shape = [config.num_steps, rows.count]
        inputs_ph = tf.placeholder(tf.int32, shape, "inputs")
        targets_ph = tf.placeholder(tf.int32, shape, "targets")
        before = _build_state(network.state_shapes, rows.count)
        # Read once: a network that reads it twice must not read what `keep_state_op` has written.
        state = {part: tf.convert_to_tensor(variable) for part, variable in before.items()}
        top_TBX, after = network.run(inputs_ph, state, context)
        # Divided by the GLOBAL batch size: the losses of all ranks add up to the loss, so that
        # shares of different sizes weigh as they should.
        scale_N = tf.fill([math.prod(shape)], 1 / config.batch_size)
        targets_N = tf.reshape(targets_ph, [-1])
        loss, nll_N = network.cross_entropy(top_TBX, targets_N, scale_N, context)
        for penalty in context.penalties:
            loss += penalty
        nll_sum = ops.column_sums(nll_N[:, None], rows.micro_batches)[0]
        # The state must not be overwritten before everything that reads it has run.
        with tf.control_dependencies([nll_sum, *state.values()]):
            keep_state_op = _assign(before, after)
        reset_state_op = _assign(before, {name: tf.zeros_like(s) for name, s in before.items()})
    return Model(
        inputs_ph,
        targets_ph,
        loss,
        nll_sum,
        nll_N,
        keep_state_op,
        reset_state_op,
        context.cuts,
    )


def _build_state(shapes: Mapping[str, Sequence[int]], rows: int) -> Mapping[str, tf.Variable]:
    return {
        name: tf.get_variable(
            f"state_{name}",
            [rows, *shape],
            initializer=tf.zeros_initializer(),
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
            trainable=False,
            use_resource=True,
        )
        for name, shape in shapes.items()
    }


def _assign(variables: Mapping[str, tf.Variable], values: State) -> tf.Operation:
    return tf.group(*[variable.assign(values[name]).op for name, variable in variables.items()])
