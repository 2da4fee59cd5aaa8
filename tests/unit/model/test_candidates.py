"""Candidates of sampled losses, compared with the formulas of TensorFlow's samplers."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.errors import UserError
from lm.model.candidates import sample_candidates

V = 12
PROBABILITIES = {
    "uniform": np.full(V, 1 / V),
    "log_uniform": np.log((np.arange(V) + 2) / (np.arange(V) + 1)) / np.log(V + 1),
}


def draw(num_sampled, distribution, unique, runs, sampler=None):
    """Return the candidates and the expected counts of all classes, for each run."""
    with tf.Graph().as_default(), tf.Session() as session:
        seed_ph = tf.placeholder(tf.int32, [2])
        true = tf.range(V, dtype=tf.int64)[:, None]
        if sampler:
            found = sampler(true, 1, num_sampled, unique, V, seed=1)
        else:
            found = sample_candidates(seed_ph, true, num_sampled, V, unique, distribution)
        assert found[0].shape == [num_sampled]
        results = [session.run(found, {seed_ph: [seed, 5]}) for seed in range(runs)]
        return [np.array(parts) for parts in zip(*results)]


@pytest.mark.parametrize("distribution", PROBABILITIES)
@pytest.mark.parametrize("unique", [True, False])
def test_distributions_are_those_of_tensorflow(distribution, unique):
    sampler = getattr(tf.nn, f"{distribution}_candidate_sampler")
    expected, own = (draw(5, distribution, unique, 1000, f) for f in (sampler, None))
    # About four standard deviations.
    frequencies = [
        np.bincount(sampled.ravel(), minlength=V) / 1000 for sampled, *_ in (own, expected)
    ]
    np.testing.assert_allclose(*frequencies, atol=0.1)
    np.testing.assert_allclose(own[1].mean(0), expected[1].mean(0), atol=0.035)
    for sampled, true, counts in zip(*own):
        assert not unique or len(set(sampled)) == 5
        np.testing.assert_array_equal(counts, true[sampled, 0])
    if not unique:
        np.testing.assert_allclose(own[1][0, :, 0], 5 * PROBABILITIES[distribution], 1e-5)


def test_all_classes_can_be_unique_candidates():
    sampled, expected_counts, _ = draw(V, "log_uniform", True, 1)
    assert sorted(sampled[0]) == list(range(V))
    # The expected counts are those of a number of draws.
    last = np.log1p(-expected_counts[0, -1, 0]) / np.log1p(-PROBABILITIES["log_uniform"][-1])
    assert last > V and abs(last - round(last)) < 1e-2


@pytest.mark.parametrize(
    "arguments, message",
    [((V + 1, V), "13 unique candidates of 12"), ((3, V, True, "zipf"), "uniform or log_uniform")],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(UserError, match=message):
        sample_candidates(tf.constant([1, 2]), tf.constant([[0]], tf.int64), *arguments)
