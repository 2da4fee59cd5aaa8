"""Dropout masks and other random numbers of a network."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.data.batches import Rows
from tests.unit.model.networks import context_of


def masks(keep_prob=0.5, seed=1, step=7, mask_index=0, rows=8, units=64):
    with tf.Graph().as_default(), tf.Session() as session:
        context = context_of(Rows(0, rows), Config(seed=seed), step, num_draws=mask_index)
        return session.run(context.dropout(tf.ones([4, rows, units]), keep_prob))


def test_dropout_masks_do_not_repeat_in_the_next_step():
    assert (masks(mask_index=1023) != masks(step=8)).mean() > 0.4
    of_key = [masks(mask_index=index) for index in (0, 1023, 1024, 2048)]
    assert all((a != b).mean() > 0.4 for a, b in itertools.combinations(of_key, 2))
    assert (masks(mask_index=1024) != masks(step=8)).mean() > 0.4


def test_dropout_keeps_the_expectation():
    for keep_prob in (0.35, 0.5, 0.9):
        dropped = masks(keep_prob, rows=20, units=500)
        assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / keep_prob)}
        assert (dropped[0] != dropped[1]).any() and (dropped[:, 0] != dropped[:, 1]).any()
        np.testing.assert_allclose(dropped.mean(), 1, atol=0.05)


@pytest.mark.parametrize("shape", [[6, 5], [3, 6, 5], [4, 6, 5], [6, 4, 2, 3]])
def test_masks_do_not_depend_on_the_number_of_ranks(shape):
    def masks(rows, **options):
        own = [rows.count if size == 6 else size for size in shape]
        return context_of(rows, **options).dropout(tf.ones(own), 0.5)

    with tf.Graph().as_default(), tf.Session() as session:
        rows = [Rows(0, 6), Rows(0, 2), Rows(2, 1), Rows(3, 3)]
        whole, *parts, second = session.run([*map(masks, rows), masks(rows[0], num_draws=1)])
    np.testing.assert_array_equal(whole, np.concatenate(parts, shape.index(6)))
    assert (whole != second).mean() > 0.3


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_common_mask_depends_on_the_global_row_but_not_on_the_time_step(in_a_loop):
    def masks(rows, step=7):
        context = context_of(rows, Config(locked_dropout=not in_a_loop), step)
        ones_TBH = tf.ones([5, rows.count, 64])
        if in_a_loop:
            return tf.map_fn(lambda x: context.dropout(x, 0.5), ones_TBH)
        return context.dropout(ones_TBH, 0.5)

    with tf.Graph().as_default(), tf.Session() as session:
        rows = [Rows(0, 6), Rows(0, 2), Rows(2, 4)]
        whole, *parts, later = session.run([*map(masks, rows), masks(rows[0], step=8)])
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis=1))
    assert (whole == whole[:1]).all() and set(np.unique(whole)) == {0, 2}
    assert 0.4 < np.mean(whole[0, 0] != whole[0, 1]) < 0.6
    assert 0.4 < np.mean(whole != later) < 0.6


DRAWS = {
    "seed": lambda context: context.seed(),
    "candidates": lambda context: context.sample_candidates([[0]], 8, 1000).sampled,
    "mask of rows": lambda context: context.dropout(tf.ones([5, 4, 64]), 0.5),
    "mask without rows": lambda context: context.dropout(tf.ones([40, 3, 7]), 0.5),
    "mask of unknown rows": lambda context: context.dropout(
        tf.placeholder_with_default(tf.ones([64, 3]), [None, 3]), 0.5
    ),
    "dropped weights": lambda context: context.drop_weights(tf.ones([32, 32]), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_depend_on_seed_step_call_and_micro_batch(name):
    def draw_twice(first_row=0, seed=1, step=7):
        context = context_of(Rows(first_row, 4), Config(seed=seed), step)
        return [DRAWS[name](context) for _ in range(2)]

    with tf.Graph().as_default(), tf.Session() as session:
        uses = {}, {}, {"seed": 2}, {"step": 8}, {"first_row": 4}
        (first, second), same, *others = session.run([draw_twice(**use) for use in uses])
    np.testing.assert_array_equal([first, second], same)
    differ = [(first != other).mean() > 0.3 for other in (second, *(one for one, _ in others))]
    assert differ == [True, True, True, name != "dropped weights"]
    if "seed" != name != "candidates":
        assert set(np.unique(first)) == {0, 2}
