"""Networks of config files: variables, state and tied weights."""

import dataclasses

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.errors import UserError
from lm.model.network import Network
from lm.training.step import run_step
from lm.user.network_check import check_network
from tests.unit.model.networks import (
    GOOD,
    HEADER,
    OWN_TABLE,
    SCOPED,
    V,
    train_and_evaluate,
    train_graph,
)

VALID = {
    "a scope": "    for _ in range(2):\n"
    "        with tf.variable_scope('a', reuse=tf.AUTO_REUSE):\n"
    "            x *= tf.get_variable('w', [4])\n",
    "time steps": "    with tf.variable_scope('a') as scope:\n"
    "        x *= tf.get_variable('w', [4])\n"
    "        scope.reuse_variables()\n"
    "        x *= tf.get_variable('w', [4])\n",
    "a table": "    x += context.embed(inputs_TB)\n",
    "a gradient": "    x = tf.recompute_grad(lambda x: x * tf.get_variable('w', [4]))(x)\n",
    "a function": "    @tf.function\n"
    "    def scaled(x):\n"
    "        return x * tf.get_variable('w', [4])\n"
    "    x = scaled(x)\n",
    "names that only differ in case": "".join(
        f"    x *= tf.get_variable('{name}', [4])\n" for name in ("W", "w", "Softmax/bias")
    ),
}


@pytest.mark.parametrize("body", VALID.values(), ids=VALID.keys())
def test_valid_uses_of_variables_are_trained(load, body):
    losses = train_and_evaluate(load(HEADER + body + GOOD))
    assert losses[-1] < losses[0]


SMALLER = HEADER.replace("inputs_TB)\n", "inputs_TB, 3)\n") + (
    "    x = tf.concat([x, x[:, :, :1]], 2)\n"
)


@pytest.mark.parametrize("text", [SMALLER, SCOPED], ids=["another size", "in a scope"])
def test_the_embedding_can_be_tied(load, text):
    losses = train_and_evaluate(load(text + GOOD), tie_weights=True)
    assert losses[-1] < losses[0]


def test_a_network_may_change_the_dictionary_of_its_state(load):
    file = load(HEADER + "    y = x + state['h']\n    state['h'] = x[-1]\n    return y, state\n")
    assert train_and_evaluate(file) == train_and_evaluate(load(HEADER + GOOD))
    check_network(file.config, V, file.functions)


def test_a_constraint_applies_to_an_embedding(load):
    file = load(OWN_TABLE % ", constraint=tf.abs" + GOOD)
    with tf.Graph().as_default(), tf.Session() as session:
        config = dataclasses.replace(file.config, batch_size=1)
        step = train_graph(Network(config, V, file.functions))
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        (table,) = [v for v in tf.trainable_variables() if v.op.name == "embedding"]
        assert (session.run(table) < 0).any()
        words = np.zeros([6, 1], np.int32)
        run_step(session.run, *step, words[:-1], words[1:], 1.0)
        assert (session.run(table) >= 0).all()


def test_build_logits_with_the_same_output_layer_has_the_same_losses(load):
    file = load(HEADER + GOOD)
    own = HEADER.replace("build_outputs", "build_logits") + (
        "    y = x + state['h']\n"
        "    w = tf.get_variable('softmax/weights', [4, context.vocab_size])\n"
        "    b = tf.get_variable('softmax/bias', [context.vocab_size])\n"
        "    return tf.tensordot(y, w, 1) + b, {'h': x[-1]}\n"
    )
    expected = train_and_evaluate(file)
    np.testing.assert_allclose(train_and_evaluate(load(own)), expected, rtol=1e-6)
    assert expected[-1] < expected[0]


INTEGERS = (
    HEADER.replace("[config.hidden_size]", "([1], 'int32')")
    + """
    offset = 2**24 + 1  # not a float32
    before_1B = tf.nn.relu(tf.transpose(state["h"]) - offset)
    x += context.embed(tf.concat([before_1B, inputs_TB[:-1]], axis=0), name="before")
    return x, {"h": inputs_TB[-1][:, None] + offset}
"""
)


def test_a_state_may_be_integers(load, caplog):
    file = load(INTEGERS)
    losses = train_and_evaluate(file)
    assert losses[-1] < losses[0]
    check_network(file.config, V, file.functions)
    assert not caplog.text


def test_a_network_may_read_the_words(load):
    body = "    lengths = tf.constant([float(len(word)) for word in context.words])\n"
    file = load(HEADER + body + "    x += tf.gather(lengths, inputs_TB)[:, :, None]\n" + GOOD)
    words = [f"{2**i}" for i in range(V)]
    check_network(file.config, V, file.functions, words=words)
    with pytest.raises(UserError, match="InvalidArgumentError: indices"):
        check_network(file.config, V, file.functions, words=words[:-1])


# The loss does not need this state, which takes long to compute.
LATE = """
    z = tf.ones([300, 300]) * tf.cast(1 + 0 * inputs_TB[0, 0], tf.float32)
    for _ in range(20):
        z = tf.tanh(tf.matmul(z, z))
    last = inputs_TB[-1:] + tf.cast(0 * tf.reduce_sum(z), tf.int32)
    return x + state['h'], {'h': context.embed(last)[0]}
"""


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_state_is_computed_before_the_weights_change(load, optimizer):
    file = load(HEADER + LATE)
    config = dataclasses.replace(file.config, optimizer=optimizer)
    threads = tf.ConfigProto(inter_op_parallelism_threads=2, use_per_session_threads=True)
    with tf.Graph().as_default(), tf.Session(config=threads) as session:
        step = train_graph(Network(config, V, file.functions), gpu=0)
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        (table,) = [v for v in tf.trainable_variables() if v.op.name == "embedding"]
        words = np.arange(18, dtype=np.int32).reshape(6, 3) % V
        before = session.run(table)
        run_step(session.run, *step, words[:-1], words[1:], 1.0)
        np.testing.assert_array_equal(step[1].state["h"], before[words[-2]])
        assert (session.run(table) != before).any()
