"""Config files with user-defined networks, and functions that build, start and train networks."""

import dataclasses
import importlib.util
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.data.batches import Rows, rows_of_rank
from lm.distributed.communicator import Communicator
from lm.distributed.devices import Device
from lm.functions import BUILT_IN
from lm.model.context import Context
from lm.model.network import Network
from lm.model.ops import fastest
from lm.model.windows import WindowRunner, build_window_graph
from lm.optimize.averaging import Average
from lm.training.step import build_train_graph, divide_rows, run_step
from tests.commands import ROOT

V = 11
HEADER = """
import tensorflow.compat.v1 as tf
from lm.config import Config

def get_config():
    return Config(name="mine", hidden_size=4, num_steps=5, batch_size=3)

def state_shapes(config):
    return {"h": [config.hidden_size]}

def build_outputs(inputs_TB, state, context):
    x = context.embed(inputs_TB)
"""
SCOPED = HEADER.replace("    x = context", "    with tf.variable_scope('a'):\n        x = context")
OWN_TABLE = HEADER.replace(
    "    x = context.embed(inputs_TB)\n",
    "    shape = [context.vocab_size, context.config.hidden_size]\n"
    "    x = tf.gather(tf.get_variable('embedding', shape%s), inputs_TB)\n",
)
GOOD = "    return x + state['h'], {'h': x[-1]}\n"

# The code between the two comments is unchanged from 2016.
CLASSIC = """
import tensorflow.compat.v1 as tf
from lm.config import Config

def get_config():
    return Config(name="classic", corpus="embedded", hidden_size=64, keep_prob=0.9)

def state_shapes(config):
    return {f"{i}/{part}": [config.hidden_size] for i in range(config.num_layers) for part in "ch"}

def build_outputs(inputs_TB, state, context):
    config = context.config
    inputs = context.dropout(context.embed(inputs_TB), config.keep_prob)
    layers = range(config.num_layers)
    initial_state = tuple(
        tf.nn.rnn_cell.LSTMStateTuple(state[f"{i}/c"], state[f"{i}/h"]) for i in layers
    )
    # --- unchanged
    cell = tf.nn.rnn_cell.MultiRNNCell(
        [tf.nn.rnn_cell.BasicLSTMCell(config.hidden_size, forget_bias=0.0) for _ in layers]
    )
    outputs, last = tf.nn.dynamic_rnn(cell, inputs, initial_state=initial_state, time_major=True)
    # ---
    new_state = {f"{i}/{part}": getattr(last[i], part) for i in layers for part in "ch"}
    return context.dropout(outputs, config.keep_prob), new_state
"""


needs_tf_keras = pytest.mark.skipif(
    not importlib.util.find_spec("tf_keras"), reason="run_scripts/setup.sh --dev installs tf_keras"
)


def fields_read_by(*patterns):
    """Return the fields of Config that some modules read as `config.<field>`, for training."""
    text = "".join(path.read_text() for pattern in patterns for path in ROOT.glob(pattern))
    names = set(re.findall(r"config\.(\w+)", text)) - {"eval_batch_size"}
    return names & Config.__dataclass_fields__.keys()


def context_of(rows, config=None, step=7, **options):
    """Return the context of some rows in a training step, with the compiled ops."""
    step = tf.constant(step, tf.int64)
    rows = dict(num_rows=rows.count, first_row=rows.first)
    return Context(config or Config(), V, ops=fastest(), step=step, **rows, **options)


def start_values(config, functions=BUILT_IN):
    """Return the initial values of the variables of a network by name."""
    with tf.Graph().as_default(), tf.Session() as session:
        build_window_graph(Network(config, V, functions), Rows(0, 1), "eval")
        session.run(tf.global_variables_initializer())
        return session.run({v.op.name: v for v in tf.global_variables()})


def train_graph(network, at_once=None, gpu=None, comm=None):
    """Build the graph of a training step on one process, and its runner; see `divide_rows`."""
    config = network.config
    rows = rows_of_rank(config.batch_size, 0, 1, config.virtual_ranks)
    division = divide_rows(rows, Device(1, 1, gpu), network.is_built_in, at_once)
    graph = build_train_graph(network, comm or Communicator(), division)
    return graph, WindowRunner(graph.window, rows, division.num_threads)


def train(config, functions=BUILT_IN, at_once=1, steps=3, vocab_size=V):
    """Return all variables and the recurrent state after some steps on one process."""
    config = functions.resolve(config)
    words = np.random.default_rng(0).integers(0, vocab_size, [100, config.batch_size])
    with tf.Graph().as_default():
        tokens = ["<eos>", *map(str, range(1, vocab_size))]
        graph, runner = train_graph(Network(config, vocab_size, functions, tokens), at_once)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in range(steps):
                at = slice(step * config.num_steps, (step + 1) * config.num_steps + 1)
                inputs, targets = words[at][:-1], words[at][1:]
                result = run_step(session.run, graph, runner, inputs, targets, 0.5)
            values = session.run({v.op.name: v for v in tf.global_variables()})
    return {**values, **runner.state, "nats": np.array(result.nll.nats)}


def train_and_evaluate(file, **fields):
    """Build the graphs of a training run, and return the losses of five steps."""
    config = dataclasses.replace(file.config, **fields)
    words = np.random.default_rng(0).integers(0, V, [config.num_steps + 1, config.batch_size])
    with tf.Graph().as_default(), tf.Session() as session:
        network = Network(config, V, file.functions)
        with file.functions.one_line_errors():
            step = train_graph(network)
            build_window_graph(network, Rows(0, 2), "eval")
            if config.asgd_trigger_epochs:
                Average()
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        windows = words[:-1].astype(np.int32), words[1:].astype(np.int32)
        with file.functions.one_line_errors(running=True):
            losses = [run_step(session.run, *step, *windows, 0.1).nll.nats for _ in range(5)]
        assert session.run(tf.train.get_global_step()) == 5
        return losses
