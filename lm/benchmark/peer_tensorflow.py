"""The training step of TensorFlow's PTB tutorial.

The tutorial (tensorflow/models, tutorials/rnn/ptb/ptb_word_lm.py) unrolls BasicLSTMCell and uses
the stock softmax cross-entropy, gradients and optimizer. TensorFlow 2.18 lacks BasicLSTMCell, so
this module contains the equations of the cell, with the same order of gates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from lm.benchmark.worker import Step, StepResult, initial_weight
from lm.config import Config
from lm.distributed.communicator import OneProcess
from lm.distributed.devices import session_config, start_tensorflow


class TutorialGraph:
    """The tutorial's graph for one process."""

    def __init__(self, config: Config, vocab_size: int):
        shape = [config.num_steps, config.batch_size]
        self.inputs_ph = tf.placeholder(tf.int32, shape)
        self.targets_ph = tf.placeholder(tf.int32, shape)
        logits, keep_state_op = self._build_layers(config, vocab_size)
        nll = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=tf.reshape(self.targets_ph, [-1]), logits=logits
        )
        self.loss = tf.reduce_sum(nll) / config.batch_size
        variables = tf.trainable_variables()
        gradients = tf.gradients(self.loss, variables)
        # An infinite limit makes all gradients NaN, and one near float32's maximum makes them 0.
        limit = min(config.max_grad_norm, 1e30)
        clipped, self.grad_norm = tf.clip_by_global_norm(gradients, limit)
        optimizer = tf.train.GradientDescentOptimizer(config.learning_rate)
        update_op = optimizer.apply_gradients(zip(clipped, variables))
        self.train_op = tf.group(update_op, keep_state_op)

    def _build_layers(self, config: Config, vocab_size: int):
        hidden = config.hidden_size
        embedding = tf.get_variable("embedding", [vocab_size, hidden])
        inputs = tf.nn.embedding_lookup(embedding, self.inputs_ph)
        outputs = tf.unstack(tf.nn.dropout(inputs, rate=1 - config.keep_prob))
        assignments = []
        for layer in range(config.num_layers):
            kernel = tf.get_variable(f"lstm_{layer}/kernel", [2 * hidden, 4 * hidden])
            bias = tf.get_variable(f"lstm_{layer}/bias", [4 * hidden])
            state = tf.get_variable(
                f"lstm_{layer}/state",
                initializer=tf.zeros([2, config.batch_size, hidden]),
                trainable=False,
            )
            # Read the state once: a later read might return the state of the next window.
            before = tf.identity(state)
            outputs, after = _unroll(outputs, *tf.unstack(before), kernel, bias)
            with tf.control_dependencies([before]):
                assignments.append(state.assign(tf.stack(after)).op)
            outputs = [tf.nn.dropout(output, rate=1 - config.keep_prob) for output in outputs]
        weights = tf.get_variable("softmax/weights", [hidden, vocab_size])
        bias = tf.get_variable("softmax/bias", [vocab_size])
        logits = tf.nn.xw_plus_b(tf.concat(outputs, axis=0), weights, bias)
        return logits, tf.group(*assignments)


def _unroll(inputs: Sequence[tf.Tensor], c, h, kernel, bias):
    outputs = []
    for x in inputs:
        z = tf.nn.bias_add(tf.matmul(tf.concat([x, h], axis=1), kernel), bias)
        i, j, f, o = tf.split(z, 4, axis=1)
        c = c * tf.sigmoid(f) + tf.sigmoid(i) * tf.tanh(j)
        h = tf.tanh(c) * tf.sigmoid(o)
        outputs.append(h)
    return outputs, (c, h)


def build_step(config: Config, vocab_size: int, variant: str, threads: int) -> Step:
    """Build the training step; there is only one variant."""
    # The tutorial left the number of parallel operations to TensorFlow, which uses all cores.
    sessions = session_config(start_tensorflow(OneProcess(), threads, threads))
    with tf.Graph().as_default():
        graph = TutorialGraph(config, vocab_size)
        session = tf.Session(config=sessions)
        session.run(tf.global_variables_initializer())
        for variable in tf.trainable_variables():
            variable.load(_initial(config, variable), session)
    fetches = [graph.loss, graph.grad_norm, graph.train_op]

    def step(inputs: np.ndarray, targets: np.ndarray) -> StepResult:
        feed = {graph.inputs_ph: inputs, graph.targets_ph: targets}
        loss, grad_norm, _ = session.run(fetches, feed)
        return StepResult(float(loss), float(grad_norm))

    return step


def _initial(config: Config, variable: tf.Variable) -> np.ndarray:
    """Return the initial value. A kernel stacks the input weights and the recurrent weights."""
    name, shape = variable.op.name, tuple(variable.shape.as_list())
    if not name.endswith("/kernel"):
        return initial_weight(config, name, shape)
    layer, half = name.split("/")[0], (shape[0] // 2, shape[1])
    parts = ("input_weights", "recurrent_weights")
    return np.concatenate([initial_weight(config, f"{layer}/{part}", half) for part in parts])
