"""Networks that define their losses."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.data.batches import Rows
from lm.errors import UserError
from lm.model import decoding
from lm.model.network import Network
from lm.model.windows import build_window_graph
from lm.user.network_check import check_network
from tests.unit.model.networks import HEADER, V, train_and_evaluate, train_graph

STATELESS = HEADER.replace("def state_shapes", "def unused")
LOSSES = STATELESS.replace("build_outputs(inputs_TB,", "build_losses(inputs_TB, targets_TB,")
FULL = """
    x_TBH = tf.tanh(x)
    w_HV, b_V = context.output_layer(4)
    logits_TBV = tf.tensordot(x_TBH, w_HV, 1) + b_V
    losses_TB = tf.nn.sparse_softmax_cross_entropy_with_logits(targets_TB, logits_TBV)
"""
SAMPLED = """
    if context.training:
        sampled = tf.random.stateless_uniform([6], context.seed(), 0, 11, tf.int64)
        losses_TB = tf.reshape(
            tf.nn.sampled_softmax_loss(
                tf.transpose(w_HV), b_V, tf.reshape(targets_TB, [-1, 1]),
                tf.reshape(x_TBH, [-1, 4]), 6, 11,
                sampled_values=(sampled, tf.fill([15, 1], 0.5), tf.fill([6], 0.5)),
            ), [5, 3],
        )
"""
RETURN = "    return losses_TB, {}\n"
PREDICTION = "    return tf.tanh(x), {}\n"
OUTPUTS = "\n" + STATELESS[STATELESS.index("def build_outputs") :] + PREDICTION


def test_losses_of_the_built_in_output_layer_equal_build_outputs(load):
    expected = train_and_evaluate(load(STATELESS + PREDICTION))
    np.testing.assert_allclose(train_and_evaluate(load(LOSSES + FULL + RETURN)), expected, 1e-6)


def test_sampled_losses_are_repeatable_and_checked(load, caplog):
    file = load(LOSSES + FULL + SAMPLED + RETURN + OUTPUTS)
    losses = train_and_evaluate(file)
    assert np.isfinite(losses).all() and train_and_evaluate(file) == losses
    check_network(file.config, V, file.functions)
    assert not caplog.text


@pytest.mark.parametrize(
    ("weights", "variable", "kind"),
    [
        ("tf.get_variable('rows', [11, 4])", "rows", tf.IndexedSlices),
        ("tf.transpose(w_HV)", "softmax/weights", tf.Tensor),
    ],
)
def test_a_sampled_loss_has_a_sparse_gradient_unless_it_transposes(load, weights, variable, kind):
    body = FULL + SAMPLED.replace("tf.transpose(w_HV)", weights)
    file = load(LOSSES + body + RETURN)
    with tf.Graph().as_default():
        graph, _ = train_graph(Network(file.config, V, file.functions))
        (found,) = (v for v in tf.trainable_variables() if v.op.name == variable)
        (gradient,) = tf.gradients(graph.window.loss, [found])
        assert isinstance(gradient, kind)


@pytest.mark.parametrize(
    "body, message",
    [
        ("    smooth_TB = -tf.reduce_mean(tf.nn.log_softmax(logits_TBV), 2)\n"
         "    losses_TB += 0.1 * (smooth_TB - losses_TB)\n",
         "probabilities exp\\(-loss\\) of all words sum to"),
        ("    losses_TB /= 5\n", "words sum to .*, not 1: build_losses must return the exact"),
        ("    losses_TB += tf.cumsum(tf.reduce_mean(x_TBH, 2), reverse=True)\n", "on later words"),
    ],
)  # fmt: skip
def test_inexact_losses_in_evaluation_are_an_error(load, body, message):
    file = load(LOSSES + FULL + body + RETURN)
    train_and_evaluate(file)
    with pytest.raises(UserError, match=message):
        check_network(file.config, V, file.functions)


@pytest.mark.parametrize("vocab_size", [255, 256, 257])
def test_probabilities_are_added_up_in_blocks_of_256_up_to_a_number_of_words(load, vocab_size):
    file = load(LOSSES + FULL + RETURN)
    check_network(file.config, vocab_size, file.functions)
    inexact = load(LOSSES + FULL + "    losses_TB += 0.01\n" + RETURN)
    check_network(inexact.config, vocab_size, inexact.functions, max_words=vocab_size - 1)
    with pytest.raises(UserError, match=r"words sum to 0\.9900\d*, not 1"):
        check_network(inexact.config, vocab_size, inexact.functions, max_words=vocab_size)


def test_a_prediction_of_another_model_is_a_warning(load, caplog):
    file = load(LOSSES + FULL + RETURN + OUTPUTS.replace("tanh", "sin"))
    check_network(file.config, V, file.functions)
    assert "computes different results for single words and for windows" in caplog.text


def test_each_function_may_have_variables_of_its_own(load):
    own = "    x_TBH += tf.get_variable('%s', [4])\n"
    outputs = OUTPUTS.replace("tanh(x)", "tanh(x * tf.get_variable('b', [4]))")
    file = load(LOSSES + FULL.replace("    w_HV", own % "a" + "    w_HV") + RETURN + outputs)
    with tf.Graph().as_default():
        network = Network(file.config, V, file.functions)
        for name in ("first", "second"):
            build_window_graph(network, Rows(0, 3), name)
        decoding.create_variables(network)
        names = {variable.op.name for variable in tf.global_variables()}
    assert names == {"a", "b", "embedding", "softmax/weights", "softmax/bias"}


@pytest.mark.parametrize(
    "body, message",
    [
        ("    return x, {}\n", "build_losses: losses must have the shape (5, 3), not (5, 3, 4)"),
        (FULL + "    return losses_TB, {'h': x[-1]}\n", "new_state has ['h'], but state_shapes"),
        ("    w = tf.zeros([2, 3]) + tf.zeros([4])\n", "line 13, in build_losses: ValueError: "),
    ],
)  # fmt: skip
def test_a_mistake_in_losses_is_one_line(load, body, message):
    with pytest.raises(UserError) as error:
        train_and_evaluate(load(LOSSES + body))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_losses_alone_predict_no_words(load):
    file = load(LOSSES + FULL + RETURN)
    message = r"lm\.export and --sample_every_steps also need"
    with tf.Graph().as_default(), pytest.raises(UserError, match=message):
        decoding.create_variables(Network(file.config, V, file.functions))


def test_reads_words_distinguishes_all_token_ids(load):
    """float32 has no numbers between the largest two of these IDs and their neighbors."""
    text = "def reads_words(config):\n    return 2\n"
    losses = "    return tf.cast(tf.roll(inputs_TB, 1, 0) % 97, tf.float32), {}\n"
    file = load(text + LOSSES.replace("    x = context.embed(inputs_TB)\n", losses))
    words = np.array([[5], [0], [2**24], [2**24 + 1], [2**31 - 2], [7]], np.int32)
    with tf.Graph().as_default(), tf.Session() as session:
        network = Network(file.config, 2**31 - 1, file.functions)
        by_word = session.run(
            decoding.target_log_probs(network, tf.constant(words), tf.zeros_like(words))
        )
    np.testing.assert_array_equal(-by_word[1:], words[:-1] % 97)
