"""Sums of negative log-likelihoods, the perplexity, and metrics of different tokenizers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping


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


@dataclasses.dataclass
class TextSize:
    """The size of a text, which the tokenizer does not influence."""

    bytes: int = 0  # size of the UTF-8 text
    characters: int = 0
    words: int = 0  # words that are separated by white space, and line ends


def text_metrics(
    nll: NllSum, size: TextSize | None, unknown: int, has_characters: bool
) -> dict[str, float]:
    """Return the perplexity of a text, and metrics that are comparable between tokenizers.

    Args:
      nll: The sum over all tokens of the text.
      size: The size of the text, or None if only its token IDs are known.
      unknown: The number of parts of the text that became `<unk>`. `<unk>` is easier to predict
        than these parts, so the metrics are comparable only if the number is 0.
      has_characters: Whether the tokens are characters.
    """
    metrics = {"perplexity": nll.perplexity, "unknown": unknown}
    if size is None:
        return metrics
    bits = nll.nats / math.log(2)
    metrics["bits_per_byte"] = bits / size.bytes
    if has_characters:
        metrics["bits_per_character"] = bits / size.characters
    word_perplexity = NllSum(nll.nats, size.words).perplexity
    # In a text without spaces, a word is as long as a line, and its perplexity may overflow.
    if math.isfinite(word_perplexity):
        metrics["word_perplexity"] = word_perplexity
    return metrics


def metrics_text(metrics: Mapping[str, float], true_word_perplexity: float | None = None) -> str:
    """Return the results of `text_metrics` for the console."""
    perplexity, word_perplexity = metrics["perplexity"], metrics.get("word_perplexity")
    true = f" (true: {true_word_perplexity:.2f})" if true_word_perplexity else ""
    predicts_words = word_perplexity == perplexity
    text = f"perplexity {perplexity:.2f}{true if predicts_words else ''}"
    for unit in ("byte", "character"):
        if f"bits_per_{unit}" in metrics:
            text += f", {metrics[f'bits_per_{unit}']:.3f} bits/{unit}"
    if word_perplexity and not predicts_words:
        text += f", word perplexity {word_perplexity:.2f}{true}"
    if "bits_per_byte" in metrics and metrics["unknown"]:
        text += f" (not comparable: {metrics['unknown']:,} unknown)"
    return text
