"""Sums of nll."""

import math

from lm.perplexity import NllSum


def test_sums_add_by_token_not_by_batch():
    total = NllSum(2.0, 1) + NllSum(1.0, 9)
    assert total.mean == 0.3
    assert total.perplexity == math.exp(0.3)


def test_an_overflowing_perplexity_is_infinite():
    assert NllSum(1e6, 1).perplexity == math.inf
