"""Which word comes next: truncated distributions, and draws that a seed repeats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def next_word_distribution(
    log_probs: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    banned: Sequence[int] = (),
) -> np.ndarray:
    """Return the distribution that a word is drawn from.

    In this order: banned words get probability 0; p becomes proportional to p^(1/temperature);
    the `top_k` most probable words are kept; of these the fewest whose probabilities reach
    `top_p` (Holtzman et al. 2020, "The curious case of neural text degeneration"). Of words
    that are equally probable, those with the lower ids are kept.

    Args:
      log_probs: Natural log-probabilities of the words, [V].
      temperature: At least 0; at 0 all probability goes to the most probable word.
      top_k: How many words to keep; 0 keeps all.
      top_p: Probability to keep, above 0; 1 keeps all.
      banned: Ids of words that must not come, fewer than V.

    Returns:
      Probabilities, float64 [V].
    """
    scores = np.array(log_probs, np.float64)
    scores[list(banned)] = -np.inf
    scores -= scores.max()
    if temperature == 0:
        top_k = 1
    else:
        with np.errstate(over="ignore"):  # minus infinity is the right limit
            scores /= temperature
    order = np.argsort(-scores, kind="stable")
    kept = order[: top_k or len(order)]
    probabilities = np.exp(scores[kept])
    probabilities /= probabilities.sum()
    if top_p < 1:
        before = np.cumsum(probabilities) - probabilities  # a word stays if these are too few
        probabilities = np.where(before < top_p, probabilities, 0.0)
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
