"""Selection of the next word: truncated distributions and reproducible draws."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from lm.errors import UserError
from lm.options import MAX_SEED, Checked, option


@dataclasses.dataclass(frozen=True)
class Sampling(Checked):
    """Flags of text generation."""

    prompt: str = option("", "text to continue (default: the start of a text)")
    num_words: int = option(100, "number of new tokens in each text", low=1)
    num_samples: int = option(1, "number of texts", low=1)
    stop_at_eos: bool = option(False, "end a text at the first generated line end (<eos>)")
    temperature: float = option(
        1.0, "values below 1 prefer probable words; 0 always selects the most probable word", low=0
    )
    top_k: int = option(0, "draw from the K most probable words; 0 for all words", low=0)
    top_p: float = option(
        1.0, "draw from the fewest words whose total probability reaches P", above=0, high=1
    )
    seed: int | None = option(
        None, "seed of the draws (default: a new seed, which is logged)", low=0, high=MAX_SEED
    )
    allow_unk: bool = option(False, "generate <unk> too")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
            object.__setattr__(self, "seed", seed)


def next_word_distribution(
    log_probs: np.ndarray, sampling: Sampling, banned: Sequence[int] = ()
) -> np.ndarray:
    """Return the distribution of the next word, float64 [V], for natural log-probabilities [V].

    First, banned words get probability 0. Second, p becomes proportional to p^(1/temperature).
    Third, only the `top_k` most probable words are kept. Fourth, only the fewest of these words
    whose total probability reaches `top_p` are kept (Holtzman et al. 2020, "The curious case of
    neural text degeneration"). Among equally probable words, lower IDs are kept.
    """
    scores = np.array(log_probs, np.float64)
    scores[list(banned)] = -np.inf
    best = scores.max()
    if not np.isfinite(best):  # A user-defined network may fail on single words.
        raise UserError(
            f"no word can be drawn, because the largest log-probability is {best}: use a different"
            " checkpoint"
        )
    scores -= best
    if sampling.temperature > 0:
        with np.errstate(over="ignore"):  # Minus infinity is the correct limit.
            scores /= sampling.temperature
    order = np.argsort(-scores, kind="stable")
    kept = order[: sampling.top_k or len(order)] if sampling.temperature > 0 else order[:1]
    probabilities = np.exp(scores[kept])
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        total_before = np.cumsum(probabilities) - probabilities
        probabilities = np.where(total_before < sampling.top_p, probabilities, 0.0)
        probabilities /= probabilities.sum()
    distribution = np.zeros(len(scores))
    distribution[kept] = probabilities
    return distribution


def draw(distribution: np.ndarray, random: float) -> int:
    """Return the ID of a word with a positive probability, given a random number in [0, 1)."""
    cumulative = np.cumsum(distribution)
    # Rounding may leave the sum below 1. Scale the random number, so that it always selects a word.
    return int(np.searchsorted(cumulative, random * cumulative[-1], side="right"))
