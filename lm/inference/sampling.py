"""Which word comes next: truncated distributions, and draws that a seed repeats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional

import numpy as np

from lm.errors import UserError
from lm.options import Checked, option


@dataclasses.dataclass(frozen=True)
class Sampling(Checked):
    """What texts are drawn, and how; see `next_word_distribution`.

    Raises UserError, naming the field, for a value out of range.
    """

    prompt: str = option("", "words to go on from (default: the start of a sentence)")
    num_words: int = option(100, "words of each text", low=1)
    num_samples: int = option(1, "texts", low=1)
    temperature: float = option(1.0, "below 1: safer words; 0: always the most probable", low=0)
    top_k: int = option(0, "draw from so many most probable words; 0: from all", low=0)
    top_p: float = option(
        1.0, "draw from the fewest words of this probability together", above=0, high=1
    )
    seed: Optional[int] = option(None, "of the draws (default: a new one, which is told)", low=0)
    allow_unk: bool = option(False, "generate <unk> too")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is None:
            new = int(np.random.SeedSequence().generate_state(1)[0])
            object.__setattr__(self, "seed", new)  # the way to set a field of a frozen dataclass


def next_word_distribution(
    log_probs: np.ndarray, sampling: Sampling, banned: Sequence[int] = ()
) -> np.ndarray:
    """Return the distribution that a word is drawn from.

    In this order: banned words get probability 0; p becomes proportional to p^(1/temperature);
    the `top_k` most probable words are kept; of these the fewest whose probabilities reach
    `top_p` (Holtzman et al. 2020, "The curious case of neural text degeneration"). Of words
    that are equally probable, those with the lower ids are kept.

    Args:
      log_probs: Natural log-probabilities of the words, [V].
      sampling: With a temperature of 0 all probability goes to the most probable word; a `top_k`
        of 0 and a `top_p` of 1 keep all words.
      banned: Ids of words that must not come, fewer than V.

    Returns:
      Probabilities, float64 [V].

    Raises:
      UserError: The network gives no word that may come a probability.
    """
    scores = np.array(log_probs, np.float64)
    scores[list(banned)] = -np.inf
    best = scores.max()
    if not np.isfinite(best):  # a network of the user's, in windows of one word
        raise UserError(
            f"no word can be drawn: the greatest log-probability is {best}; train with"
            " --check_network, which looks at single words too"
        )
    scores -= best
    if sampling.temperature > 0:
        with np.errstate(over="ignore"):  # minus infinity is the right limit
            scores /= sampling.temperature
    order = np.argsort(-scores, kind="stable")
    kept = order[: sampling.top_k or len(order)] if sampling.temperature > 0 else order[:1]
    probabilities = np.exp(scores[kept])
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        before = np.cumsum(probabilities) - probabilities  # a word stays if these are too few
        probabilities = np.where(before < sampling.top_p, probabilities, 0.0)
        probabilities /= probabilities.sum()
    distribution = np.zeros(len(scores))
    distribution[kept] = probabilities
    return distribution


def draw(distribution: np.ndarray, random: float) -> int:
    """Draw a word by inverting the cumulative distribution.

    Args:
      distribution: Probabilities [V].
      random: Uniform in [0, 1).

    Returns:
      An id, of a word whose probability is not 0.
    """
    cumulative = np.cumsum(distribution)
    # The sum may fall short of 1 by rounding; scaled, no random number is beyond the last word.
    return int(np.searchsorted(cumulative, random * cumulative[-1], side="right"))
