"""Generate the embedded corpus, a random language whose perplexity is known exactly.

The corpus shows whether a model learns. Its text is a first-order Markov chain over a few hundred
words. `<eos>` is one of the states, so that a line ends when the chain visits `<eos>`. The true
probabilities of the chain give the lowest perplexity that a model can expect.

The text must be the same on all machines and with all versions of NumPy. Everything that decides a
word therefore uses only PCG64's `random()`, the four IEEE operations of arithmetic and sequential
sums: no `choice`, no `log` or `pow`, no pairwise `sum`.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lm import files
from lm.errors import UserError

EOS = 0  # the state of `<eos>`; states 1, 2, ... are the words, roughly from frequent to rare


@dataclasses.dataclass(frozen=True)
class KnownPerplexity:
    """The perplexities of a perfect model, over all tokens including `<eos>`."""

    valid_perplexity: float
    test_perplexity: float


def transition_matrix(seed: int, num_words: int, num_successors: int) -> np.ndarray:
    """Draw the transition probabilities of a random language.

    Returns:
      P, float64 [num_words + 1, num_words + 1]. P[i, j] is the probability of state j after i.
    """
    assert 2 <= num_successors <= num_words
    random = np.random.Generator(np.random.PCG64(seed)).random
    num_states = num_words + 1
    # Zipf-like popularity, flattened at the head, creates frequent and rare words. `<eos>` is the
    # most frequent token, so that sentences have about fifteen tokens.
    popularity = 1.0 / (np.arange(num_states) + 20.0)
    popularity[EOS] *= 6.0
    popularity = np.cumsum(popularity).tolist()
    # A cycle through all states, in random order, makes every word reachable from every word.
    cycle = np.argsort(random(num_states), kind="stable")
    next_on_cycle = dict(zip(cycle.tolist(), np.roll(cycle, -1).tolist()))
    transitions = np.zeros((num_states, num_states))
    for state in range(num_states):
        successors = [next_on_cycle[state]]
        while len(successors) < num_successors:
            drawn = bisect.bisect_right(popularity[:-1], random() * popularity[-1])
            if drawn not in successors and not drawn == state == EOS:  # no empty lines
                successors.append(drawn)
        weights = random(num_successors) + 0.1
        weights[0] += 0.5  # the cycle may be the only path to a rare word
        transitions[state, successors] = weights / np.cumsum(weights)[-1]
    return transitions


def sample_states(transitions: np.ndarray, rng: np.random.Generator, min_tokens: int) -> list[int]:
    """Sample the chain from `<eos>`, not included, to the first `<eos>` after `min_tokens`."""
    successors = [np.flatnonzero(row).tolist() for row in transitions]
    # The inverse CDF of each state, without the last bound, which rounding could exceed.
    bounds = [np.cumsum(row[row > 0])[:-1].tolist() for row in transitions]
    states, state = [], EOS
    while True:
        # A block of draws gives the same numbers as single draws, in a quarter of the time.
        for draw in rng.random(10_000).tolist():
            state = successors[state][bisect.bisect_right(bounds[state], draw)]
            states.append(state)
            if state == EOS and len(states) >= min_tokens:
                return states


def text_perplexity(transitions: np.ndarray, states: list[int]) -> float:
    """Return exp(mean -log P) of `states` under the chain P [S, S], starting from `<eos>`."""
    return float(np.exp(-np.log(transitions[[EOS, *states[:-1]], states]).mean()))


def word_names(num_words: int) -> list[str]:
    """Return distinct pronounceable words, shortest first: `ba`, `be`, ..., `baba`, ..."""
    syllables = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
    lengths = itertools.count(1)
    names = ("".join(w) for n in lengths for w in itertools.product(syllables, repeat=n))
    return list(itertools.islice(names, num_words))


def write_corpus(
    directory: str | os.PathLike[str],
    seed: int = 1,
    num_words: int = 200,
    num_successors: int = 8,
    train_tokens: int = 400_000,
    eval_tokens: int = 20_000,
) -> KnownPerplexity:
    """Write the three splits of a language, one sentence per line, and `truth.json`.

    The content depends only on the arguments, and each file is written atomically. Several
    processes may therefore make the same call at the same time, and a repeated call does not change
    anything.

    Args:
      directory: The directory, which is created if it is missing.
      seed: Seed of the language and of the splits.
      num_words: Number of words, without `<eos>`.
      num_successors: Number of tokens that may follow each token, from 2 to `num_words`.
      train_tokens: Minimum number of tokens, including `<eos>`. Every word must occur.
      eval_tokens: Minimum number of tokens in the validation text and in the test text.

    Raises:
      UserError: If the directory contains a different corpus that this function did not write.
    """
    transitions = transition_matrix(seed, num_words, num_successors)
    # Each split has a separate generator, so that its content does not depend on the length of the
    # previous split.
    rngs = [np.random.Generator(np.random.PCG64([seed, stream])) for stream in (1, 2, 3)]
    train, valid, test = (
        sample_states(transitions, rng, min_tokens)
        for rng, min_tokens in zip(rngs, (train_tokens, eval_tokens, eval_tokens))
    )
    assert len(set(train)) == num_words + 1, "train_tokens is too small for all words"
    # The last digits depend on the CPU. Rounding makes `truth.json` the same on all machines.
    known = KnownPerplexity(
        valid_perplexity=round(text_perplexity(transitions, valid), 9),
        test_perplexity=round(text_perplexity(transitions, test), 9),
    )
    names = ["\n", *word_names(num_words)]
    contents = {}
    for split, states in (("train", train), ("valid", valid), ("test", test)):
        text = " ".join(names[s] for s in states).replace(" \n", "\n").replace("\n ", "\n")
        contents[f"{split}.txt"] = text.encode("ascii")
    contents["truth.json"] = (json.dumps(dataclasses.asdict(known), indent=2) + "\n").encode()
    _write_files(Path(directory), contents)
    return known


def _write_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    present = {n: (directory / n).read_bytes() for n in contents if (directory / n).exists()}
    changed = [name for name in contents if present.get(name) != contents[name]]
    for name in changed:
        if name in present and "truth.json" not in present:
            raise UserError(f"{directory / name} is a different corpus and is not overwritten")
    for name in changed:
        files.write_atomically(str(directory / name), contents[name])
