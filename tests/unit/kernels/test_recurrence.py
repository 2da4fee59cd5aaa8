"""The LSTM recurrences, compared with their equations in float64."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.model import plain
from tests.unit.kernels.arrays import assert_near, lstm_inputs, lstm_loss, numbers, run


def plain_recurrence(projected, bias, weights, h, c, keep_TB1=None):
    outputs = []
    for t, projected_t in enumerate(tf.unstack(projected)):
        if keep_TB1 is not None:
            h, c = h * keep_TB1[t], c * keep_TB1[t]
        i, j, f, o = tf.split(projected_t + bias + tf.matmul(h, weights), 4, axis=1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(j)
        h = tf.sigmoid(o) * tf.tanh(c)
        outputs.append(h)
    return tf.stack(outputs), h, c


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "T, B, H",
    # The weights of the last shape need a buffer that smaller operations do not use again.
    [(1, 1, 1), (3, 1, 5), (4, 3, 33), (2, 17, 64), (5, 20, 200), (2, 10, 650), (2, 61, 40),
     (1, 2, 900)],
)  # fmt: skip
def test_recurrence_and_its_gradient(T, B, H, precision):
    check_recurrence(kernels.lstm_recurrence, (T, B, H), precision)


def test_recurrence_in_plain_tensorflow_with_xla():
    recurrence = functools.partial(plain.lstm_recurrence, uses_xla=True)
    check_recurrence(recurrence, (4, 3, 33), "bfloat16")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("module", [kernels, plain])
def test_states_of_some_rows_are_reset(module, precision):
    keep_TB1 = np.random.default_rng(0).integers(2, size=(4, 9, 1)).astype(np.float32)
    check_recurrence(module.lstm_recurrence, (4, 9, 33), precision, keep_TB1=keep_TB1)


def check_recurrence(recurrence, shape, precision, **resets):
    inputs = lstm_inputs(*shape)

    def with_gradients(recurrence, *placeholders):
        outputs = recurrence(*placeholders)
        return outputs, tf.gradients(lstm_loss(outputs), placeholders)

    ours = functools.partial(recurrence, precision=precision, **resets)
    actual = run(functools.partial(with_gradients, ours), inputs)
    resets = {name: factor.astype(np.float64) for name, factor in resets.items()}
    exact = functools.partial(with_gradients, functools.partial(plain_recurrence, **resets))
    expected = run(exact, [x.astype(np.float64) for x in inputs])
    for a, e in zip(tf.nest.flatten(actual), tf.nest.flatten(expected)):
        assert_near(a, e, precision)


def recurrence_of(rows, H, precision):
    """Return outputs and gradients of some of 61 rows, except sums over rows."""
    projected, bias, weights, h0, c0 = lstm_inputs(3, 61, H)
    dh = numbers(3, 61, H, seed=3)

    def outputs(projected, *inputs):
        *state, dh = inputs
        h, h_last, c_last = kernels.lstm_recurrence(projected, *state, precision)
        dprojected, dh0, dc0 = tf.gradients(h, [projected, *state[2:]], dh)
        return [h, dprojected, *(x[None] for x in (h_last, c_last, dh0, dc0))]

    return run(outputs, [projected[:, rows], bias, weights, h0[rows], c0[rows], dh[:, rows]])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("H", [40, 650])  # threads divide the rows, or the units
def test_recurrence_of_a_row_does_not_depend_on_other_rows(H, precision):
    every = np.arange(61)
    whole = recurrence_of(every, H, precision)
    for rows in every[:1], every[1:11], every[16:49], every[3::2], every[::-1]:
        for some, all_rows in zip(recurrence_of(rows, H, precision), whole):
            np.testing.assert_array_equal(some, all_rows[:, rows])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_recurrence_propagates_nan(bad, precision):
    inputs = lstm_inputs(2, 3, 20)
    inputs[0][1, 2, 25] = bad  # the candidate of unit 5: tanh(inf) = 1 is a number, NaN is not
    inputs[4][0, 7] = bad
    h, _, c = run(lambda *p: kernels.lstm_recurrence(*p, precision), inputs)
    assert not np.isfinite(c[0, 7])
    assert np.isnan(h[1, 2, 5]) == np.isnan(bad)
    assert np.isfinite(h[:, 1]).all()  # the row with finite inputs
