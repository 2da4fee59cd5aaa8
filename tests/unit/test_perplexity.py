"""Metrics that are comparable between tokenizers."""

import math

import numpy as np
import pytest

from lm.model.evaluator import sum_of_units, units_of
from lm.perplexity import NllSum, TextSize, metrics_text, text_metrics
from lm.tokens.text import Block, Part, measured
from lm.tokens.tokenizers import split_words

TEXT = "the cat sat\nthe mét sat\n"
# The probability that a model of words gives to each word of the text.
WORD_PROBABILITIES = {"the": 0.4, "cat": 0.1, "mét": 0.05, "sat": 0.2, "<eos>": 0.5}
# The pieces of each word, and the share of each piece in the word's negative log-likelihood.
PIECES = {"the": [1.0], "cat": [0.75, 0.25], "mét": [0.5, 0.3, 0.2], "sat": [1.0], "<eos>": [1.0]}


def size_of(text):
    size = TextSize()
    list(measured([Block(Part("text"), 1, text.encode())], size))
    return size


def nlls_of_words():
    return [-math.log(WORD_PROBABILITIES[word]) for word in split_words(TEXT)]


def test_models_that_give_words_the_same_probabilities_have_the_same_metrics():
    """A model of pieces predicts each word with the probability of the model of words."""
    words = NllSum(sum(nlls_of_words()), 8)
    nlls = [nll * share for word, nll in zip(split_words(TEXT), nlls_of_words())
            for share in PIECES[word]]  # fmt: skip
    pieces = NllSum(sum(nlls), len(nlls))
    assert pieces.tokens == 11 and pieces.perplexity < 0.8 * words.perplexity
    of_words = text_metrics(words, size_of(TEXT), 0, False)
    of_pieces = text_metrics(pieces, size_of(TEXT), 0, False)
    assert of_words["word_perplexity"] == of_words["perplexity"] == words.perplexity
    assert of_pieces["word_perplexity"] == pytest.approx(words.perplexity)
    assert of_pieces["bits_per_byte"] == pytest.approx(of_words["bits_per_byte"])


@pytest.mark.parametrize("num_tokens", [1, 10**13])
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_one_loss_that_is_not_finite_makes_the_perplexity_infinite(loss, num_tokens):
    assert sum_of_units(units_of(np.array([1.0, loss])), num_tokens).perplexity == math.inf


def test_the_units_of_the_metrics():
    nll = NllSum(24 * math.log(2), 12)
    found = text_metrics(nll, TextSize(bytes=48, characters=16, words=3), 0, True)
    assert found == pytest.approx({
        "perplexity": 4.0, "unknown": 0, "bits_per_byte": 0.5, "bits_per_character": 1.5,
        "word_perplexity": 256.0,
    })  # fmt: skip
    assert metrics_text(found, 200) == (
        "perplexity 4.00, 0.500 bits/byte, 1.500 bits/character, word perplexity 256.00"
        " (true: 200.00)"
    )


@pytest.mark.parametrize(
    "nll, size, unknown, text",
    [
        (NllSum(24 * math.log(2), 12), TextSize(48, 48, 12), 0, "perplexity 4.00, 0.500 bits/byte"),
        (
            NllSum(24 * math.log(2), 12), TextSize(48, 48, 12), 1234,
            "perplexity 4.00, 0.500 bits/byte (not comparable: 1,234 unknown)",
        ),
        (NllSum(2.0, 2), None, 0, "perplexity 2.72"),
        # This text has almost no spaces, so its word perplexity is too large for a float.
        (NllSum(5.5 * 300, 300), TextSize(300, 100, 2), 0, "perplexity 244.69, 7.935 bits/byte"),
    ],
    ids=["words", "unknown words", "token IDs", "no spaces"],
)  # fmt: skip
def test_the_text_shows_each_metric_once(nll, size, unknown, text):
    found = text_metrics(nll, size, unknown, False)
    assert found["unknown"] == unknown and metrics_text(found) == text
    assert ("word_perplexity" in found) == (size is not None and size.words == 12)
