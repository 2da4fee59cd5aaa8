"""Dropout masks."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.errors import UserError
from lm.model.context import Context
from lm.model.ops import fastest

T, B, H = 4, 3, 6


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
