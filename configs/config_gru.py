"""GRU: a user-defined network in TensorFlow's stock operations. Copy this example.

python -m lm.train --config configs/config_gru.py --output_dir runs/gru
mpirun -np 2 python -m lm.train --config configs/config_gru.py
python -m lm.evaluate --config configs/config_gru.py --run runs/gru

docs/own_graph.md describes the functions. Shapes: T time steps, B rows, H hidden units.
"""

import tensorflow.compat.v1 as tf

from lm.config import Config


def get_config():
    """Return a small model for PTB, or for the synthetic corpus with --corpus embedded.

    The optimizer is Adam. With SGD and the learning rate of config_small, the loss jumps and then
    diverges.
    """
    return Config(
        name="gru", hidden_size=200, keep_prob=0.8,
        optimizer="adam", learning_rate=1e-3, lr_decay=0.7,
    )  # fmt: skip


def state_shapes(config):
    """Return the shape of each part of a row's recurrent state. The initial state is zero."""
    return {"h": [config.hidden_size]}


def build_outputs(inputs_TB, state, context):
    """Build a layer of gated recurrent units (Cho et al. 2014, arXiv:1406.1078) for a window."""
    config, units = context.config, context.config.hidden_size
    x_TBH = context.dropout(context.embed(inputs_TB), config.keep_prob)
    inputs = x_TBH.shape[2] + units  # the units of a word plus the units of the state
    gates = tf.get_variable("gates/weights", [inputs, 2 * units])
    gates_bias = tf.get_variable("gates/bias", [2 * units], initializer=tf.ones_initializer())
    candidate = tf.get_variable("candidate/weights", [inputs, units])
    candidate_bias = tf.get_variable("candidate/bias", [units], initializer=tf.zeros_initializer())
    h, outputs = state["h"], []
    for x in tf.unstack(x_TBH):
        z = tf.sigmoid(tf.matmul(tf.concat([x, h], 1), gates) + gates_bias)
        reset, update = tf.split(z, 2, axis=1)
        new = tf.tanh(tf.matmul(tf.concat([x, reset * h], 1), candidate) + candidate_bias)
        h = update * h + (1 - update) * new
        outputs.append(h)
    return context.dropout(tf.stack(outputs), config.keep_prob), {"h": h}
