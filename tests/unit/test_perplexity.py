"""Sums of negative log-likelihoods."""

import math

from lm.perplexity import NllSum


def test_each_token_of_a_sum_has_the_same_weight():
    total = NllSum(2.0, 1) + NllSum(1.0, 9)
    assert total.mean == 0.3
    assert total.perplexity == math.exp(0.3)


def test_an_overflowing_perplexity_is_infinite():
    assert NllSum(1e6, 1).perplexity == math.inf
