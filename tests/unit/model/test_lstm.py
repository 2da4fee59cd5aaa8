"""The recurrent layer, compared with TensorFlow's automatic differentiation, and dropout masks."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.errors import UserError
from lm.model import lstm
from lm.model.context import Context
from lm.model.ops import fastest

T, B, I, H = 4, 3, 5, 6


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(np.float32)


def inputs():
    x = tf.constant(numbers(T, B, I))
    state = lstm.LSTMState(tf.constant(numbers(B, H, seed=1)), tf.constant(numbers(B, H, seed=2)))
    shapes = ([I, 4 * H], [H, 4 * H], [4 * H])
    return x, state, lstm.LSTMWeights(*(tf.constant(numbers(*shape)) for shape in shapes))


def layer(x, state, weights):
    return lstm.lstm_layer(x, state, weights, fastest())


def plain_lstm(x, state, weights):
    """The equations of the paper, one time step at a time."""
    h, c = state
    outputs = []
    for x_t in tf.unstack(x):
        z = tf.matmul(x_t, weights.input) + tf.matmul(h, weights.recurrent) + weights.bias
        i, j, f, o = tf.split(z, 4, axis=1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(j)
        h = tf.sigmoid(o) * tf.tanh(c)
        outputs.append(h)
    return tf.stack(outputs), lstm.LSTMState(h, c)


def loss_of(run, x, state, weights):
    outputs, last = run(x, state, weights)
    return (
        tf.reduce_sum(outputs * numbers(T, B, H))
        + tf.reduce_sum(last.h * numbers(B, H))
        + tf.reduce_sum(last.c * numbers(B, H, seed=3))
    )


def test_outputs_and_gradients_equal_automatic_differentiation(path):
    with tf.Graph().as_default(), tf.Session() as session:
        x, state, weights = inputs()
        ours = loss_of(layer, x, state, weights)
        plain = loss_of(plain_lstm, x, state, weights)
        variables = [x, *weights]
        results = session.run(
            [ours, plain, tf.gradients(ours, variables), tf.gradients(plain, variables)]
        )
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4)
    for gradient, expected in zip(results[2], results[3]):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_two_windows_with_a_carried_state_equal_one_window(path):
    with tf.Graph().as_default(), tf.Session() as session:
        x, state, weights = inputs()
        whole, last = layer(x, state, weights)
        first, middle = layer(x[: T // 2], state, weights)
        second, end = layer(x[T // 2 :], middle, weights)
        results = session.run([whole, tf.concat([first, second], 0), last, end])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
    np.testing.assert_allclose(results[2], results[3], rtol=1e-6)


def masks(keep_prob=0.5, seed=1, step=7, mask_index=0, rows=8, units=64):
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.constant(step, tf.int64)
        context = Context(
            Config(seed=seed), 10, fastest(), num_rows=rows, step=step, num_draws=mask_index
        )
        return session.run(context.dropout(tf.ones([T, rows, units]), keep_prob))


def test_dropout_masks_depend_on_seed_step_index_and_row():
    base = masks()
    for other in (masks(seed=2), masks(step=8), masks(mask_index=1)):
        assert 0.4 < np.mean(base != other) < 0.6
    assert 0.4 < np.mean(base[:, 0] != base[:, 1]) < 0.6
    assert 0.4 < np.mean(base[0] != base[1]) < 0.6


def test_dropout_masks_do_not_repeat_in_the_next_step():
    assert (masks(mask_index=1023) != masks(step=8)).mean() > 0.4
    with tf.Graph().as_default():
        step = tf.constant(0, tf.int64)
        context = Context(Config(), 10, num_rows=B, step=step, num_draws=1024)
        with pytest.raises(UserError, match="random numbers more than 1024 times a step"):
            context.dropout(tf.ones([T, B, H]), 0.5)


def test_dropout_keeps_the_expectation():
    for keep_prob in (0.35, 0.5, 0.9):
        dropped = masks(keep_prob, rows=20, units=500)
        assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / keep_prob)}
        np.testing.assert_allclose(dropped.mean(), 1, atol=0.05)
