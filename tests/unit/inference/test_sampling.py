"""Truncated distributions and draws from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.errors import UserError
from lm.inference.sampling import Sampling, draw, next_word_distribution

LOG_PROBS = np.log([0.1, 0.4, 0.05, 0.25, 0.2])

vocabularies = st.lists(st.floats(-20, 5), min_size=2, max_size=30).map(np.array)


def test_without_limits_it_is_the_models_softmax():
    np.testing.assert_allclose(next_word_distribution(LOG_PROBS, Sampling()), np.exp(LOG_PROBS))


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"temperature": 0.0}, {"top_p": 1e-9}])
def test_the_tightest_limits_are_greedy(limits):
    np.testing.assert_array_equal(
        next_word_distribution(LOG_PROBS, Sampling(**limits)), [0, 1, 0, 0, 0]
    )


def test_top_k_keeps_the_most_probable_and_of_equals_the_first():
    found = next_word_distribution(LOG_PROBS, Sampling(top_k=2))
    np.testing.assert_allclose(found, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0])
    np.testing.assert_allclose(
        next_word_distribution(np.log([0.25] * 4), Sampling(top_k=3)), [1 / 3, 1 / 3, 1 / 3, 0]
    )


@pytest.mark.parametrize("top_p, kept", [(0.39, 1), (0.41, 2), (0.64, 2), (0.7, 3), (0.99, 5)])
def test_top_p_keeps_the_fewest_words_that_reach_it(top_p, kept):
    found = next_word_distribution(LOG_PROBS, Sampling(top_p=top_p))
    assert np.count_nonzero(found) == kept
    assert set(np.flatnonzero(found)) == set(np.argsort(-LOG_PROBS)[:kept])


def test_top_p_counts_the_probability_that_top_k_and_temperature_leave():
    # Of 0.4 and 0.25, the first has 0.615: alone enough for 0.6, though not of the whole.
    assert np.count_nonzero(next_word_distribution(LOG_PROBS, Sampling(top_k=2, top_p=0.6))) == 1


@given(log_probs=vocabularies, temperature=st.floats(0.05, 20))
def test_temperature_is_a_power_of_the_probabilities(log_probs, temperature):
    powers = np.exp((log_probs - log_probs.max()) / temperature)
    np.testing.assert_allclose(
        next_word_distribution(log_probs, Sampling(temperature=temperature)),
        powers / powers.sum(),
        atol=1e-12,
    )


@given(
    log_probs=vocabularies,
    temperature=st.floats(0, 20),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.01, 1),
    random=st.floats(0, 1, exclude_max=True),
    banned=st.sampled_from([[], [0], [1]]),
)
def test_any_limits_leave_a_distribution_without_the_banned(
    log_probs, temperature, top_k, top_p, random, banned
):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    found = next_word_distribution(log_probs, sampling, banned)
    assert found.sum() == pytest.approx(1)
    assert (found >= 0).all() and not found[banned].any()
    assert np.count_nonzero(found) <= (top_k or len(found))
    assert found[draw(found, random)] > 0


@pytest.mark.parametrize("log_probs", [[-1.0, np.nan, -1.0], [0.0, -np.inf, -np.inf]])
def test_where_no_word_may_come_it_is_told(log_probs):
    with pytest.raises(UserError, match=r"no word can be drawn: .* is (nan|-inf); train with"):
        next_word_distribution(np.array(log_probs), Sampling(), banned=[0])


def test_the_largest_random_number_draws_a_word_that_may_come():
    distribution = np.array([0.0, 0.1 + 0.2, 0.7 - 1e-16, 0.0])
    assert draw(distribution, np.nextafter(1, 0)) == 2
    assert draw(distribution, 0.0) == 1


@pytest.mark.parametrize("limits", [{}, {"temperature": 0.6}, {"top_k": 3, "temperature": 1.5}])
def test_frequencies_of_draws_match_the_distribution(limits):
    """Chi-square: with 4 degrees of freedom, 23.5 is exceeded once in ten thousand times."""
    distribution = next_word_distribution(LOG_PROBS, Sampling(**limits))
    random = np.random.Generator(np.random.PCG64([1, 0])).random
    draws = 20_000
    counts = np.bincount([draw(distribution, random()) for _ in range(draws)], minlength=5)
    possible = distribution > 0
    assert not counts[~possible].any()
    expected = draws * distribution[possible]
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 23.5
