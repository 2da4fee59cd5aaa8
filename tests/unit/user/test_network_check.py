"""Networks that `--check_network` rejects or accepts."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.data.batches import Rows
from lm.errors import UserError
from lm.model import decoding
from lm.model.network import Network
from lm.model.windows import WindowRunner, build_window_graph
from lm.user.network_check import NetworkCheck, check_network
from tests.unit.model.networks import CLASSIC, GOOD, HEADER, V, needs_tf_keras, train_and_evaluate

# The first word of each pair sees the second word.
AHEAD = """
    T = inputs_TB.shape[0]
    x = tf.gather(x, [min(t + 1 - t % 2, T - 1) for t in range(T)])
"""
# The length of a row is the number of words that are not 0.
PADDING = """
    lengths = tf.reduce_sum(tf.sign(inputs_TB), 0)
    x *= tf.transpose(tf.sequence_mask(lengths, inputs_TB.shape[0], tf.float32))[:, :, None]
"""


@pytest.mark.parametrize(
    "body, message",
    [
        ("    return tf.cumsum(x, reverse=True), {'h': x[-1]}\n", "depend on later words"),
        (AHEAD + GOOD, "depend on later words"),
        ("    x = tf.log(x - 9)\n" + GOOD, "initial weights, not all results are finite"),
        (
            "    large = tf.constant([0.0, 0.0, 0.0, -1e9])\n"
            "    return tf.cumsum(x, reverse=True) + large, {'h': x[-1]}\n",
            "depend on later words",
        ),
        (
            "    gate = tf.get_variable('gate', [], initializer=tf.zeros_initializer())\n"
            "    return x + gate * tf.cumsum(x, reverse=True), {'h': x[-1]}\n",
            "depend on later words",
        ),
        (PADDING + GOOD, "depend on later words"),
        ("    x += tf.zeros([5, 1, 4])\n" + GOOD, r"shape \(1, 1, any\), not \(5,"),
        (
            "    if inputs_TB.shape[0] > 1:\n        x *= tf.get_variable('w', [4])\n" + GOOD,
            "uses the variable w in some calls only",
        ),
    ],
)
def test_outputs_that_see_later_words_are_an_error(load, body, message):
    train_and_evaluate(load(HEADER + body))  # training does not reveal the mistake
    if message == "depend on later words":  # In long windows, only some time steps are checked.
        config = dataclasses.replace(load(HEADER).config, num_steps=20)
        with pytest.raises(UserError, match=message):
            check_network(config, V, load(HEADER + body).functions)
    with pytest.raises(UserError, match=message):
        check_network(load(HEADER).config, V, load(HEADER + body).functions)


WITHIN_THE_WINDOW = {
    "a convolution": "    x += tf.pad(x, [[1, 0], [0, 0], [0, 0]])[:-1]\n" + GOOD,
    "places": "    x += tf.get_variable('places', [5, 1, 4])[: inputs_TB.shape[0]]\n" + GOOD,
    "small weights": "    y, small = tf.cumsum(x), tf.random_normal_initializer(0, 0.05)\n"
    "    for _ in range(3): y = tf.layers.dense(y, 4, kernel_initializer=small)\n"
    "    total = state['h'] + tf.cumsum(x)\n    return total + y, {'h': total[-1]}\n",
    "a state that stays": "    return state['h'] + tf.cumsum(x), {'h': state['h'] + 1}\n",
    "rows that depend on other rows": "    x += tf.reduce_mean(x, 1, keepdims=True)\n" + GOOD,
}


@pytest.mark.parametrize("body", WITHIN_THE_WINDOW.values(), ids=WITHIN_THE_WINDOW.keys())
def test_different_results_for_words_and_windows_are_a_warning(load, caplog, body):
    file = load(HEADER + body)
    check_network(file.config, V, file.functions)
    assert "mine.py computes different results for single words and for windows of 5" in caplog.text


@pytest.mark.parametrize(
    "body, cause",
    [
        (WITHIN_THE_WINDOW["a state that stays"], "computes different results for single words"),
        ("    return tf.cumsum(x), {'h': x[-1]}\n", "ignores its state (h), so each window starts"),
    ],
)
def test_a_disagreement_names_its_cause(load, caplog, body, cause):
    file = load(HEADER + body)
    check_network(file.config, V, file.functions)
    assert cause in caplog.text
    with tf.Graph().as_default(), tf.Session() as session:  # lm.generate runs only this check
        check = NetworkCheck(Network(file.config, V, file.functions))
        session.run(tf.global_variables_initializer())
        assert cause in check.find_disagreement(session)


STATELESS = HEADER.replace("def state_shapes", "def unused")
CONVOLUTION = "    x += tf.pad(x, [[1, 0], [0, 0], [0, 0]])[:-1]\n    return x, {}\n"


@pytest.mark.parametrize("num_steps", [5, 20])  # all time steps are checked, or some
@pytest.mark.parametrize("count, agrees", [(1, False), (2, True), (4, True), (25, True)])
def test_a_network_with_reads_words_reads_words_again(load, caplog, num_steps, count, agrees):
    text = f"def reads_words(config):\n    return {count}\n"
    file = load(text + STATELESS + CONVOLUTION)
    check_network(dataclasses.replace(file.config, num_steps=num_steps), V, file.functions)
    assert ("single words" not in caplog.text) == agrees


def test_the_check_of_lm_generate_finds_words_that_see_later_words(load):
    text = "def reads_words(config):\n    return 5\n" + STATELESS
    file = load(text + "    return tf.cumsum(x, reverse=True), {}\n")
    with tf.Graph().as_default(), tf.Session() as session:
        check = NetworkCheck(Network(file.config, V, file.functions))
        session.run(tf.global_variables_initializer())
        assert "different results for single words" in check.find_disagreement(session)


def test_a_network_reads_words_or_has_state(load, caplog):
    file = load("def reads_words(config):\n    return 2\n" + HEADER + GOOD)
    with pytest.raises(UserError, match="reads_words replaces state_shapes: let"):
        check_network(file.config, V, file.functions)
    file = load("config_transformer")
    for memory in (True, False):
        config = dataclasses.replace(file.config, hidden_size=4, num_steps=5, memory=memory)
        check_network(config, V, file.functions)
    assert "single words" not in caplog.text


@pytest.mark.parametrize(
    "losses, known, num_steps",
    [
        ("window_losses", 0, 2),
        ("window_losses", 0, 6),
        ("window_losses", 2, 2),
        ("window_losses_from_predictions", 4, 2),
    ],
)
def test_words_that_are_read_together_have_the_results_of_single_words(
    load, losses, known, num_steps
):
    """The network reads windows of 3 words, the first `known` words in earlier calls."""
    file = load("config_transformer")
    config = dataclasses.replace(file.config, hidden_size=4, num_layers=1, num_steps=3)
    config = dataclasses.replace(config, memory=False)
    words = np.random.default_rng(5).integers(0, V, [known + num_steps + 1, 2]).astype(np.int32)
    start = np.array([decoding.state_of_words(row[:known].tolist(), 3) for row in words.T])
    losses = getattr(decoding, losses)
    with tf.Graph().as_default(), tf.Session() as session:
        network, state_BK, by_word = Network(config, V, file.functions), tf.zeros([2, 3]), []
        together, after_together = decoding.continued_log_probs(
            network, *map(tf.constant, (words[known:-1], words[known + 1 :], start)), losses
        )
        for inputs, targets in itertools.pairwise(words):
            nll, state_BK = decoding.next_loss(network, inputs, targets, state_BK, losses)
            by_word.append(-nll)
        session.run(tf.global_variables_initializer())
        found = session.run([together, after_together, tf.stack(by_word[known:]), state_BK])
    np.testing.assert_array_equal(found[1].view(np.int32), found[3].view(np.int32))
    np.testing.assert_allclose(found[0], found[2], rtol=1e-5)


@pytest.mark.parametrize(
    "text",
    ["config_gru", "config_transformer", pytest.param(CLASSIC, marks=needs_tf_keras, id="classic")],
)
def test_words_and_windows_have_the_same_results(load, text, caplog):
    file = load(text)
    config = dataclasses.replace(file.config, hidden_size=4, num_steps=5, init_scale=0.8)
    check_network(config, V, file.functions)
    assert "single words" not in caplog.text
    words = np.random.default_rng(5).integers(0, V, [11, 2]).astype(np.int32)
    with tf.Graph().as_default(), tf.Session() as session:
        network = Network(config, V, file.functions)
        model = build_window_graph(network, Rows(0, 2), "eval")
        by_word = decoding.target_log_probs(network, *map(tf.constant, (words[:-1], words[1:])))
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        runner = WindowRunner(model, Rows(0, 2))
        windows = [(words[t : t + 5], words[t + 1 : t + 6]) for t in (0, 5)]
        nll = [runner.run(session.run, model.nll_TB, *window, {})[0] for window in windows]
        np.testing.assert_allclose(session.run(by_word), -np.concatenate(nll), rtol=1e-4)


@pytest.mark.parametrize(
    "body",
    [
        "    x += tf.get_variable('w', initializer=tf.random_uniform([4]))\n" + GOOD,
        "    return x, {'h': tf.boolean_mask(x[-1], inputs_TB[-1] >= 0)}\n",
        "    x *= tf.get_variable('w', [4], collections=['local_variables'], trainable=False)\n"
        + GOOD,
        "    is_on = tf.get_variable('is_on', [], tf.bool, trainable=False)\n"
        "    x += tf.cast(tf.get_variable('n', [], tf.int32, trainable=False), tf.float32)\n"
        "    x = tf.where_v2(is_on, 0.0, x)\n" + GOOD,
        "    with tf.variable_scope('a', reuse=not context.training):\n"
        "        x *= tf.get_variable('w', [4])\n" + GOOD,
        "    words = tf.concat([tf.cast(state['h'][None, :, 0], tf.int32), inputs_TB[:-1]], 0)\n"
        "    x += context.embed(words)\n"
        "    last = tf.cast(inputs_TB[-1][:, None], tf.float32) * tf.ones([4])\n"
        "    return x, {'h': last}\n",
        "    return x, {'h': tf.log(tf.nn.relu(x[-1]))}\n",
    ],
    ids=["a tensor as initial value", "a state whose rows are not known", "a local variable",
         "variables that count", "reuse after training", "words as state", "probabilities of 0"],
)  # fmt: skip
def test_networks_that_train_can_be_scored(load, body):
    file = load(HEADER + body)
    assert np.isfinite(train_and_evaluate(file)).all()
    check_network(file.config, V, file.functions)
    with tf.Graph().as_default(), tf.Session() as session:
        words = tf.zeros([6, 2], tf.int32)
        log_probs = decoding.target_log_probs(Network(file.config, V, file.functions), words, words)
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        assert session.run(log_probs).shape == (6, 2)
