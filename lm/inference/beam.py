"""Beam search with length normalization (Wu et al. 2016, arXiv:1609.08144, section 7).

Shapes: B rows, L texts, V tokens of the vocabulary. Each text has a row.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lm.inference.sampling import Sampling, largest


class Hypothesis(NamedTuple):
    """A text that continues the prompt."""

    tokens: tuple[int, ...] = ()
    log_prob: float = 0.0  # natural logarithm
    score: float = 0.0  # log_prob with the repetition penalty
    parent: int = 0  # row of the text without its last token
    is_done: bool = False


def beam_search(
    log_probs_BV: np.ndarray,
    advance: Callable[[Sequence[int], Sequence[int]], np.ndarray],
    score: Callable[[np.ndarray, Sequence[int]], np.ndarray],
    ends: Callable[[Sequence[int]], bool],
    how: Sampling,
) -> list[Hypothesis]:
    """Return up to `beam_size` texts with the best normalized scores, best first.

    Args:
      log_probs_BV: The natural log-probabilities of the first tokens, with one row.
      advance: Reads a token after the text in each of some rows. It returns the log-probabilities
        of the following tokens. Their rows are the rows of the next call.
      score: Returns the scores of the tokens after a text, given their log-probabilities, [V].
      ends: Whether a text ends after these tokens.
    """
    live, done = [Hypothesis()], []
    for _ in range(how.num_words):
        longer = _extensions(live, log_probs_BV, score, ends, 2 * how.beam_size)
        done += [text for text in longer if text.is_done]
        done = sorted(done, key=lambda text: _normalized(text, how), reverse=True)
        done = done[: how.beam_size]
        live = [text for text in longer if not text.is_done][: how.beam_size]
        if not live or (len(done) == how.beam_size and not _may_improve(live[0], done[-1], how)):
            break
        log_probs_BV = advance([text.parent for text in live], [text.tokens[-1] for text in live])
    return done


def _extensions(
    live: Sequence[Hypothesis],
    log_probs_BV: np.ndarray,
    score: Callable[[np.ndarray, Sequence[int]], np.ndarray],
    ends: Callable[[Sequence[int]], bool],
    count: int,
) -> list[Hypothesis]:
    """Return the texts with one more token and the best scores, best first.

    The count is twice the size of the beam, because half of the texts may end.
    """
    scores_LV = np.stack(
        [
            text.score + score(log_probs_V, text.tokens)
            for text, log_probs_V in zip(live, log_probs_BV)
        ]
    )
    found = []
    for index in largest(scores_LV.ravel(), count):
        row, token = divmod(int(index), scores_LV.shape[1])
        if np.isfinite(scores_LV[row, token]):
            tokens = (*live[row].tokens, token)
            log_prob = live[row].log_prob + float(log_probs_BV[row, token])
            found.append(Hypothesis(tokens, log_prob, scores_LV[row, token], row, ends(tokens)))
    return found


def _normalized(text: Hypothesis, how: Sampling) -> float:
    return text.score / _length_penalty(len(text.tokens), how)


def _length_penalty(length: int, how: Sampling) -> float:
    """Return equation 14 of Wu et al. without the coverage penalty."""
    return ((5 + length) / 6) ** how.length_penalty


def _may_improve(live: Hypothesis, worst: Hypothesis, how: Sampling) -> bool:
    """Return whether a continuation of `live` may be better than `worst`; scores only fall."""
    return live.score / _length_penalty(how.num_words, how) > _normalized(worst, how)
