"""Sums that can be added over batches and ranks, and the numbers people read."""

from __future__ import annotations

import dataclasses
import math

# In nats per token. exp of more is no float64: no perplexity can be made of it, and a run that gets
# there has diverged as surely as one that gets to NaN.
MAX_MEAN_NLL = 709.0


@dataclasses.dataclass(frozen=True)
class NllSum:
    """A summed negative log-likelihood and its number of tokens.

    Sums, not means, are what may be added over windows and ranks of different sizes.
    """

    nats: float = 0.0
    tokens: int = 0

    def __add__(self, other: NllSum) -> NllSum:
        return NllSum(self.nats + other.nats, self.tokens + other.tokens)

    @property
    def mean(self) -> float:
        """Mean negative log-likelihood, in nats per token; NaN where there is no token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(mean), or infinity where that is too large for a float."""
        try:
            return math.exp(self.mean)
        except OverflowError:
            return math.inf
