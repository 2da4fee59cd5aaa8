"""The flags of text generation, and the distribution of the next token."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from lm.errors import UserError
from lm.options import MAX_SEED, Checked, option


@dataclasses.dataclass(frozen=True)
class Sampling(Checked):
    """Flags of text generation."""

    num_words: int = option(100, "number of new tokens in each text", low=1)
    num_samples: int = option(1, "number of texts for each prompt", low=1)
    stop_at_eos: bool = option(False, "end a text at the first generated line end (<eos>)")
    stop: str = option("", "end a text before the first occurrence of this generated text")
    temperature: float = option(
        1.0, "values below 1 prefer probable words; 0 always selects the most probable word", low=0
    )
    top_k: int = option(0, "draw from the K most probable words; 0 for all words", low=0)
    top_p: float = option(
        1.0, "draw from the fewest words whose total probability reaches P", above=0, high=1
    )
    repetition_penalty: float = option(
        1.0, "multiply the log-probabilities of tokens that occur in the text or the prompt by N",
        low=1,
    )  # fmt: skip
    beam_size: int = option(
        0, "instead of drawing, search the most probable texts with a beam of N texts", low=0,
        high=1000,
    )  # fmt: skip
    length_penalty: float = option(
        0.6, "beam search: prefer long texts by dividing log-probabilities by ((5 + tokens) / 6)^N",
        low=0,
    )  # fmt: skip
    seed: int | None = option(
        None, "seed of the draws (default: a new seed, which is logged)", low=0, high=MAX_SEED
    )
    allow_unk: bool = option(False, "generate <unk> too")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
            object.__setattr__(self, "seed", seed)
        if self.beam_size and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 1.0):
            raise UserError("beam_size draws nothing: remove temperature, top_k and top_p")
        if self.beam_size and self.num_samples > self.beam_size:
            raise UserError(
                f"a beam of {self.beam_size} texts has no {self.num_samples} texts: raise beam_size"
            )


def scores_of_tokens(
    log_probs: np.ndarray,
    repetition_penalty: float = 1.0,
    seen: Sequence[int] = (),
    banned: Sequence[int] = (),
) -> np.ndarray:
    """Return the scores of the next tokens, float64 [V], for natural log-probabilities [V].

    The scores of banned tokens are minus infinity. The repetition penalty applies to the tokens in
    `seen` (Keskar et al. 2019, arXiv:1909.05858, section 4.1). The paper divides logits, which may
    have any sign. Multiplying log-probabilities always makes a token less probable.
    """
    scores = np.array(log_probs, np.float64)
    if repetition_penalty > 1:
        scores[np.unique(np.array(seen, np.int64))] *= repetition_penalty
    scores[list(banned)] = -np.inf
    best = scores.max()
    if not np.isfinite(best):  # A user-defined network may fail on single words.
        raise UserError(
            f"no word can be drawn, because the largest log-probability is {best}: use a different"
            " checkpoint"
        )
    return scores


def next_word_distribution(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the distribution of the next word, float64 [V], for `scores_of_tokens`.

    First, p becomes proportional to p^(1/temperature). Second, only the `top_k` most probable words
    are kept. Third, only the fewest of these words whose total probability reaches `top_p` are kept
    (Holtzman et al. 2020, "The curious case of neural text degeneration"). Among equally probable
    words, lower IDs are kept.
    """
    if sampling.temperature == 0:
        return np.eye(1, len(scores), scores.argmax())[0]
    scores = scores - scores.max()
    with np.errstate(over="ignore"):  # Minus infinity is the correct limit.
        scores /= sampling.temperature
    if not sampling.top_k and sampling.top_p == 1:  # Sorting would take most of the time.
        probabilities = np.exp(scores)
        return probabilities / probabilities.sum()
    if sampling.top_k:
        kept = largest(scores, sampling.top_k)
        probabilities = np.exp(scores[kept])
    else:
        probabilities = np.exp(-np.sort(-scores))  # Sorting all indices would take longer.
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        total_before = np.cumsum(probabilities) - probabilities
        probabilities = np.where(total_before < sampling.top_p, probabilities, 0.0)
        probabilities /= probabilities.sum()
    if not sampling.top_k:
        kept = largest(scores, np.flatnonzero(probabilities)[-1] + 1)
    distribution = np.zeros(len(scores))
    distribution[kept] = probabilities[: len(kept)]
    return distribution


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the largest values, in descending order of the values.

    Of equal values, smaller indices come first. Sorting all values would take longer.
    """
    lowest = np.partition(values, -count)[-count] if count < len(values) else -np.inf
    candidates = np.flatnonzero(values >= lowest)
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]
