"""The training step of TensorFlow's PTB tutorial.

The tutorial (tensorflow/models, tutorials/rnn/ptb/ptb_word_lm.py) unrolls BasicLSTMCell and uses
the stock softmax cross-entropy, gradients and optimizer. TensorFlow 2.18 lacks BasicLSTMCell, so
this module contains the equations of the cell, with the same order of gates.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from lm.benchmark.workload import Step, StepResult
from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.distributed.devices import session_config, start_tensorflow


class TutorialGraph:
    """The tutorial's graph for one process."""

    def __init__(self, config: Config, vocab_size: int):
        shape = [config.num_steps, config.batch_size]
        self.inputs_ph = tf.placeholder(tf.int32, shape)
        self.targets_ph = tf.placeholder(tf.int32, shape)
        # The recurrent state (c, h) of each layer. The tutorial feeds the final state of a window
        # to the next window.
        state_shape = [config.num_layers, 2, config.batch_size, config.hidden_size]
        self.state_ph = tf.placeholder(tf.float32, state_shape)
        logits, self.final_state = self._build_layers(config, vocab_size)
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
        self.train_op = optimizer.apply_gradients(zip(clipped, variables))

    def _build_layers(self, config: Config, vocab_size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the logits and the final state."""
        hidden = config.hidden_size
        embedding = tf.get_variable("embedding", [vocab_size, hidden])
        inputs = tf.nn.embedding_lookup(embedding, self.inputs_ph)
        outputs = tf.unstack(tf.nn.dropout(inputs, rate=1 - config.keep_prob))
        final_states = []
        for layer, state in enumerate(tf.unstack(self.state_ph)):
            kernel = tf.get_variable(f"lstm_{layer}/kernel", [2 * hidden, 4 * hidden])
            bias = tf.get_variable(f"lstm_{layer}/bias", [4 * hidden])
            outputs, final_state = _unroll(outputs, *tf.unstack(state), kernel, bias)
            outputs = [tf.nn.dropout(output, rate=1 - config.keep_prob) for output in outputs]
            final_states.append(tf.stack(final_state))
        weights = tf.get_variable("softmax/weights", [hidden, vocab_size])
        bias = tf.get_variable("softmax/bias", [vocab_size])
        logits = tf.nn.xw_plus_b(tf.concat(outputs, axis=0), weights, bias)
        return logits, tf.stack(final_states)


def _unroll(inputs: Sequence[tf.Tensor], c, h, kernel, bias):
    outputs = []
    for x in inputs:
        z = tf.nn.bias_add(tf.matmul(tf.concat([x, h], axis=1), kernel), bias)
        i, j, f, o = tf.split(z, 4, axis=1)
        c = c * tf.sigmoid(f) + tf.sigmoid(i) * tf.tanh(j)
        h = tf.tanh(c) * tf.sigmoid(o)
        outputs.append(h)
    return outputs, (c, h)


def build_step(
    config: Config, weights: Mapping[str, np.ndarray], variant: str, threads: int
) -> tuple[Step, str]:
    """Build the training step with these initial weights; there is only one variant."""
    # The tutorial left the number of parallel operations to TensorFlow, which uses all cores.
    sessions = session_config(start_tensorflow(Communicator(), threads, threads))
    weights = dict(weights)
    for layer in range(config.num_layers):
        parts = [weights[f"lstm_{layer}/{name}"] for name in ("input_weights", "recurrent_weights")]
        weights[f"lstm_{layer}/kernel"] = np.concatenate(parts)
    with tf.Graph().as_default():
        graph = TutorialGraph(config, len(weights["embedding"]))
        session = tf.Session(config=sessions)
        session.run(tf.global_variables_initializer())
        for variable in tf.trainable_variables():
            variable.load(weights[variable.op.name], session)
    fetches = [graph.loss, graph.grad_norm, graph.final_state, graph.train_op]
    state = np.zeros(graph.state_ph.shape)

    def step(inputs: np.ndarray, targets: np.ndarray) -> StepResult:
        nonlocal state
        feed = {graph.inputs_ph: inputs, graph.targets_ph: targets, graph.state_ph: state}
        loss, grad_norm, state, _ = session.run(fetches, feed)
        return StepResult(float(loss), float(grad_norm))

    return step, "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
