"""Sums of negative log-likelihoods, and the perplexity."""

from __future__ import annotations

import dataclasses
import math

# In nats per token. For larger values, the perplexity overflows float64: the run has diverged.
MAX_MEAN_NLL = 709.0


@dataclasses.dataclass(frozen=True)
class NllSum:
    """The summed negative log-likelihood of some tokens.

    Sums, unlike means, can be added over windows and ranks of different sizes.
    """

    nats: float = 0.0
    tokens: int = 0

    def __add__(self, other: NllSum) -> NllSum:
        return NllSum(self.nats + other.nats, self.tokens + other.tokens)

    @property
    def mean(self) -> float:
        """Mean negative log-likelihood in nats per token, or NaN if there are no tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(mean), or infinity if it overflows."""
        try:
            return math.exp(self.mean)
        except OverflowError:
            return math.inf
