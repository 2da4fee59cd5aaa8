"""A program that saves and restores its weights with `tf.train.Saver`, and its config file."""

import os

import numpy as np
import tensorflow.compat.v1 as tf

NETWORK = """
import tensorflow.compat.v1 as tf
from lm.config import Config

def get_config():
    return Config(name="mine", hidden_size=UNITS, num_steps=5, batch_size=4, optimizer="adam")

def reads_words(config):
    return 1

def build_logits(inputs_TB, state, context):
    units = context.config.hidden_size
    with tf.variable_scope("net"):
        x_TBH = tf.gather(tf.get_variable("wte", [context.vocab_size, units]), inputs_TB)
        x_TBH = tf.tanh(tf.einsum("tbe,eh->tbh", x_TBH, tf.get_variable("w", [units, units])))
        out = tf.get_variable("out", [units, context.vocab_size])
    return tf.einsum("tbh,hv->tbv", x_TBH, out), {}
"""
NAMES = """
def checkpoint_name(weight):
    return weight.replace("net", "model")
"""


class Program:
    """The graph of the program, with an optimizer and averages of its weights."""

    def __init__(self, num_words: int, units: int, dtype: tf.DType = tf.float32):
        """Build the graph in the default graph. The table of the words has the type `dtype`."""
        shapes = {"wte": [num_words, units], "w": [units, units], "out": [units, num_words]}
        with tf.variable_scope("model"):
            types = {name: dtype if name == "wte" else tf.float32 for name in shapes}
            values = {n: tf.cast(tf.random.normal(s), types[n]) for n, s in shapes.items()}
            weights = {n: tf.get_variable(n, initializer=v) for n, v in values.items()}
        self.weights = {weight.op.name: weight for weight in weights.values()}
        self.inputs_ph = tf.placeholder(tf.int32, [None])
        x_NH = tf.cast(tf.gather(weights["wte"], self.inputs_ph), tf.float32) @ weights["w"]
        self.logits_NV = tf.tanh(x_NH) @ weights["out"]
        step = tf.train.get_or_create_global_step()
        self.train_op = tf.train.AdamOptimizer().minimize(tf.reduce_sum(self.logits_NV), step)
        self.average_op = tf.train.ExponentialMovingAverage(0.9).apply(list(weights.values()))
        self.saver = tf.train.Saver()


def save(
    prefix: os.PathLike, num_words: int, units: int = 4, dtype: tf.DType = tf.float32
) -> dict[str, np.ndarray]:
    """Save a checkpoint of the program, and return its weights by name."""
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(1)
        program = Program(num_words, units, dtype)
        session.run(tf.global_variables_initializer())
        program.saver.save(session, str(prefix))
        weights = session.run(program.weights)
    return {name: value.astype(np.float32) for name, value in weights.items()}


def log_probs(
    directory: os.PathLike, inputs: np.ndarray, num_words: int, dtype: tf.DType = tf.float32
) -> np.ndarray:
    """Return the log-probabilities of all next words after the program restores all variables."""
    with tf.Graph().as_default(), tf.Session() as session:
        program = Program(num_words, 4, dtype)
        program.saver.restore(session, tf.train.latest_checkpoint(str(directory)))
        feed = {program.inputs_ph: inputs.reshape(-1)}
        return session.run(tf.nn.log_softmax(program.logits_NV), feed)
