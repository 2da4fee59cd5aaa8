"""Truncated distributions and draws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.errors import UserError
from lm.inference.sampling import Sampling, next_word_distribution, scores_of_tokens
from lm.model.sampler import draw

LOG_PROBS = np.log([0.1, 0.4, 0.05, 0.25, 0.2])

vocabularies = st.lists(st.floats(-20, 5), min_size=2, max_size=30).map(np.array)


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({}, np.exp(LOG_PROBS)),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        # After top_k, the most probable word reaches 0.6.
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0, 0]),
    ],
)
def test_limits_truncate_the_distribution_of_the_network(limits, expected):
    np.testing.assert_allclose(next_word_distribution(LOG_PROBS, Sampling(**limits)), expected)


def test_top_k_prefers_the_first_of_equally_probable_words():
    found = next_word_distribution(np.log([0.25] * 4), Sampling(top_k=3))
    np.testing.assert_allclose(found, [1 / 3, 1 / 3, 1 / 3, 0])


@pytest.mark.parametrize("top_p, kept", [(0.39, 1), (0.41, 2), (0.64, 2), (0.7, 3), (0.99, 5)])
def test_top_p_keeps_the_fewest_words_that_reach_it(top_p, kept):
    found = next_word_distribution(LOG_PROBS, Sampling(top_p=top_p))
    assert set(np.flatnonzero(found)) == set(np.argsort(-LOG_PROBS)[:kept])


@given(log_probs=vocabularies, temperature=st.floats(0.05, 20))
def test_temperature_is_a_power_of_the_probabilities(log_probs, temperature):
    powers = np.exp((log_probs - log_probs.max()) / temperature)
    found = next_word_distribution(log_probs, Sampling(temperature=temperature))
    np.testing.assert_allclose(found, powers / powers.sum(), atol=1e-12)


@given(
    log_probs=vocabularies,
    temperature=st.floats(0, 20),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.01, 1),
    random=st.floats(0, 1, exclude_max=True),
    banned=st.sampled_from([[], [0], [1]]),
)
def test_any_limits_give_a_distribution_without_banned_words(
    log_probs, temperature, top_k, top_p, random, banned
):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    found = next_word_distribution(scores_of_tokens(log_probs, banned=banned), sampling)
    assert found.sum() == pytest.approx(1)
    assert (found >= 0).all() and not found[banned].any()
    assert np.count_nonzero(found) <= (top_k or len(found))
    assert found[draw(found, random)] > 0


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 1 - 1e-12, 1.0])
def test_a_distribution_has_the_bits_of_sorting_all_words(top_p):
    random = np.random.default_rng(0)
    for scores in (np.round(random.normal(0, 3, 999)), random.normal(0, 300, 999), np.zeros(999)):
        scores[random.integers(0, 999, 9)] = -np.inf
        found = next_word_distribution(scores, Sampling(top_p=top_p))
        all_words = next_word_distribution(scores, Sampling(top_p=top_p, top_k=999))
        np.testing.assert_allclose(found, all_words, rtol=1e-12)  # sums in different orders
        if top_p < 1:
            np.testing.assert_array_equal(found, all_words)


@pytest.mark.parametrize("log_probs", [[-1.0, np.nan, -1.0], [0.0, -np.inf, -np.inf]])
def test_a_network_without_probabilities_is_an_error(log_probs):
    with pytest.raises(UserError, match=r"no word can be drawn, .* is (nan|-inf): use a diff"):
        scores_of_tokens(np.array(log_probs), banned=[0])


def test_the_repetition_penalty_is_a_power_of_the_probabilities_of_seen_tokens():
    found = next_word_distribution(scores_of_tokens(LOG_PROBS, 1.5, [1, 3, 1]), Sampling())
    powers = np.exp(LOG_PROBS) ** [1, 1.5, 1, 1.5, 1]
    np.testing.assert_allclose(found, powers / powers.sum())


def test_the_largest_random_number_draws_a_possible_word():
    distribution = np.array([0.0, 0.1 + 0.2, 0.7 - 1e-16, 0.0])
    assert draw(distribution, np.nextafter(1, 0)) == 2
    assert draw(distribution, 0.0) == 1
