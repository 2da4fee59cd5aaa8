"""One optimizer step: what is clipped, what is skipped, and where the rows are merged."""

import math

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.distributed.communicator import OneProcess
from lm.training.optimizer import build_update

WORDS = [2, 0, 2]


def one_update(max_grad_norm=math.inf, factor=1.0, **options):
    """Step once on sum(factor * (rows of WORDS)), from zeros; returns all that came of it."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        table = tf.get_variable("table", initializer=np.zeros([4, 2], "f"), use_resource=True)
        loss = factor * tf.reduce_sum(tf.gather(table, WORDS))
        config = Config(max_grad_norm=max_grad_norm, batch_size=1, num_steps=1)
        step = tf.train.get_or_create_global_step()
        update = build_update(config, loss, tf.constant(0.5), step, 4, OneProcess(), **options)
        session.run(tf.global_variables_initializer())
        norm, is_sound, _ = session.run([update.grad_norm, update.is_sound, update.train_op])
        return graph, norm, is_sound, session.run(table), session.run(step)


@pytest.mark.parametrize("max_grad_norm", [math.inf, 1e39, 1e38, 100.0, 1.0])
def test_the_norm_is_clipped_unless_its_maximum_is_no_float32(path, max_grad_norm):
    _, norm, is_sound, table, _ = one_update(max_grad_norm)
    assert is_sound and norm == pytest.approx(math.sqrt(2 * 4 + 2 * 1))
    expected = (
        -0.5 * np.array([[1, 1], [0, 0], [2, 2], [0, 0]]) * min(1, max_grad_norm / float(norm))
    )
    np.testing.assert_allclose(table, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "mean_nll, factor, sound",
    [
        (5.0, 1.0, True),
        (708.0, 1.0, True),
        (710.0, 1.0, False),  # its perplexity is no float64
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
        (5.0, math.inf, False),
    ],
)
def test_an_update_that_is_not_sound_is_skipped_and_counted(path, mean_nll, factor, sound):
    _, _, is_sound, table, step = one_update(factor=factor, mean_nll=mean_nll, skip_unsound=True)
    assert is_sound == sound and np.any(table) == sound and step == 1


def test_rows_are_merged_on_the_cpu_and_so_in_a_fixed_order(path):
    """On a GPU they would be added atomically, in any order, and the ranks would part."""
    graph = one_update()[0]
    merging = [op for op in graph.get_operations() if op.type in ("Unique", "UnsortedSegmentSum")]
    assert len(merging) == 2
    assert {tf.DeviceSpec.from_string(op.device).device_type for op in merging} == {"CPU"}
