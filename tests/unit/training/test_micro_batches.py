"""Micro-batches: their sums, seeds, added losses and moving averages."""

import dataclasses

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.config import Config
from lm.data.batches import Rows, rows_of_rank
from lm.errors import UserError
from lm.functions import BUILT_IN
from lm.model import lstm
from lm.model.network import Network
from lm.model.windows import WindowRunner, build_window_graph
from tests.unit.model.networks import GOOD, HEADER, V, fields_read_by, train

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs the compiled ops")


def assert_equal(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **tolerance)


COMMON = dict(
    hidden_size=6, num_layers=2, num_steps=4, batch_size=16, seed=3, init_scale=0.2,
    optimizer="momentum",  # its slots have all digits of small gradients, which weights would round
)  # fmt: skip
BUILT_IN_FIELDS = {
    "dropout": dict(
        keep_prob=0.7, embedding_keep_prob=0.8, output_keep_prob=0.6, forget_bias=1,
        activation_penalty=2.0, temporal_activation_penalty=1.0,
    ),
    "sparse embedding": dict(keep_prob=0.7, virtual_ranks=4, embedding_init_scale=0.3),
    "tied": dict(
        tie_weights=True, embedding_size=5, recurrent_keep_prob=0.6, reset_state="line",
        precision="bfloat16",
    ),
    "adaptive softmax": dict(adaptive_softmax_cutoffs="4,8", keep_prob=0.7, precision="bfloat16"),
    "adaptive input": dict(
        adaptive_softmax_cutoffs="4,5,8", adaptive_softmax_factor=2, adaptive_input=True,
        tie_weights=True, keep_prob=0.7, locked_dropout=True,
    ),
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(
    "name, at_once", [("dropout", 5), *((name, 1) for name in BUILT_IN_FIELDS)]
)
def test_the_gradients_of_the_built_in_network_are_exact(name, at_once):
    """Sums over rows are the same if micro-batches are computed together or one by one.

    Runs on different numbers of ranks are then bitwise identical. If this test names a variable,
    its gradient sums over rows in a different order: use the functions of `context.ops`, and
    each weight in one call for all time steps.
    """
    config = Config(**COMMON, **BUILT_IN_FIELDS[name])
    vocab_size = 200 if name == "sparse embedding" else V  # a large table has a sparse gradient
    whole = train(config, at_once=8, vocab_size=vocab_size)
    assert_equal(train(config, at_once=at_once, vocab_size=vocab_size), whole, rtol=0)


def test_each_field_that_the_built_in_network_reads_is_tested():
    tested = COMMON.keys() | set().union(*BUILT_IN_FIELDS.values())
    untested = fields_read_by("lm/model/**/*.py") - tested
    assert not untested, f"add {untested} to BUILT_IN_FIELDS"


@needs_kernels
def test_a_plain_product_with_a_weight_is_found(monkeypatch):
    def scaled_layer(x_TBI, *arguments, layer=lstm.lstm_layer):
        with tf.variable_scope("", reuse=tf.AUTO_REUSE):
            return layer(x_TBI * tf.get_variable("scale", [6]), *arguments)

    monkeypatch.setattr(lstm, "lstm_layer", scaled_layer)
    with pytest.raises(AssertionError, match="scale"):
        test_the_gradients_of_the_built_in_network_are_exact("dropout", 1)


@pytest.mark.parametrize("num_parts, threads", [(1, 1), (4, 1), (6, 1), (6, 4), (7, 2)])
def test_parts_are_joined_in_their_order_for_any_number_of_parts(load, num_parts, threads):
    functions, rows = load(HEADER + GOOD).functions, Rows(0, 2 * num_parts)
    config = Config(hidden_size=4, num_steps=5, batch_size=2)
    words = np.random.default_rng(0).integers(0, V, [2, 5, rows.count], np.int32)
    with tf.Graph().as_default(), tf.Session() as session:
        network, found = Network(config, V, functions), []
        for of_graph in (rows, Rows(0, 2)):
            graph = build_window_graph(network, of_graph, f"eval_{of_graph.count}_{len(found)}")
            runner = WindowRunner(graph, rows, threads)
            session.run(tf.global_variables_initializer())
            parts = runner.run(session.run, graph.nll_TB, *words, {})
            found.append(np.concatenate(parts, axis=1))
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        GOOD,
        "    w = tf.get_variable('w', [4, 4])\n"
        "    context.add_loss(tf.nn.l2_loss(w))\n"
        "    return tf.tensordot(x, w, 1), {'h': x[-1]}\n",
        "    n = tf.get_variable('n', [4], trainable=False, initializer=tf.ones_initializer())\n"
        "    update_op = n.assign_sub(0.1 * (n - tf.reduce_mean(x, [0, 1])))\n"
        "    if context.training:\n"
        "        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update_op)\n"
        "    return x + n, {'h': x[-1]}\n",
        "    context.penalize(x, x)\n" + GOOD,
        "    x = context.dropout(x, 0.5)\n" + GOOD,
    ],
    ids=["plain", "added loss", "moving average", "penalty", "dropout of rows"],
)
def test_the_number_of_micro_batches_does_not_change_the_model(load, body):
    functions = load(HEADER + body).functions
    penalty = 0.5 * ("penalize" in body)
    config = Config(hidden_size=4, num_steps=5, batch_size=8, activation_penalty=penalty)
    one = train(dataclasses.replace(config, virtual_ranks=1), functions)
    assert_equal(train(config, functions), one, rtol=1e-4, atol=1e-6)


def test_a_regularizer_is_an_added_loss(load):
    config = Config(hidden_size=4, num_steps=5, batch_size=4)
    variable = "    w = tf.get_variable('w', [4, 4]%s)\n%s    return x + w[0], {'h': x[-1]}\n"
    regularizer = ", regularizer=tf.nn.l2_loss"
    added = "    context.add_loss(tf.nn.l2_loss(w))\n"
    found, expected, without = (
        train(config, load(HEADER + variable % texts).functions)
        for texts in ((regularizer, ""), ("", added), ("", ""))
    )
    assert_equal(found, expected, rtol=1e-6)
    assert np.abs(found["w"] - without["w"]).max() > 0.01


def test_virtual_ranks_must_divide_the_batch_of_a_user_defined_network(load):
    functions = load(HEADER + GOOD).functions
    found = {size: functions.resolve(Config(batch_size=size)).virtual_ranks for size in (3, 12, 64)}
    assert found == {3: 1, 12: 4, 64: 8}
    with pytest.raises(UserError, match=r"virtual_ranks 8 does not divide batch_size 12.*ranks 4"):
        functions.resolve(Config(batch_size=12, virtual_ranks=8))
    assert BUILT_IN.resolve(Config(batch_size=3)).virtual_ranks == 8


def test_fewer_micro_batches_at_once_need_equal_micro_batches():
    rows = rows_of_rank(20, 0, 1, 8)
    assert rows.first_micro_batches(3).micro_batches == (2, 3)
    assert rows.first_micro_batches(100) == rows
    with pytest.raises(UserError, match="micro_batches_at_once 1 needs micro-batches of equal"):
        rows.first_micro_batches(1)
