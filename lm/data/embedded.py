"""The embedded corpus: a random language whose perplexity is known exactly.

Whether a model learned has a number here. The text is a first-order Markov chain over a few
hundred words with `<eos>` as one of its states, so a line ends when the chain visits `<eos>`, and
no model can expect to beat the perplexity exp(H), where H is the chain's entropy rate.

Text must not differ between machines or numpy versions, so everything that decides a word uses
PCG64's `random()`, the four operations of arithmetic (IEEE exact) and sequential sums alone:
no `choice`, no `log` or `pow`, no pairwise `sum`.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import os
from pathlib import Path

import numpy as np

from lm import files
from lm.errors import UserError

EOS = 0  # the state of `<eos>`; states 1, 2, ... are the words, roughly from common to rare


@dataclasses.dataclass(frozen=True)
class Truth:
    """What a perfect model reaches on a corpus, every token counted, `<eos>` included."""

    entropy_rate_nats: float  # H, nats per token
    perplexity: float  # exp(H), the limit for an endless text
    valid_perplexity: float  # of the very text in valid.txt, which being finite differs from exp(H)
    test_perplexity: float  # of the very text in test.txt


def transition_matrix(seed: int, num_words: int, num_successors: int) -> np.ndarray:
    """Draw a random language: which words may follow each word, and how probably.

    Args:
      seed: Seed of the language.
      num_words: Words besides `<eos>`.
      num_successors: Tokens that may follow each token, at least 2, at most `num_words`.

    Returns:
      P, float64 [num_words + 1, num_words + 1]; P[i, j] is the probability of state j after i.
    """
    assert 2 <= num_successors <= num_words
    random = np.random.Generator(np.random.PCG64(seed)).random
    num_states = num_words + 1
    # Zipf-like popularity, flattened at the head, gives common and rare words; `<eos>` is made
    # the commonest token, so that sentences have about fifteen.
    popularity = 1.0 / (np.arange(num_states) + 20.0)
    popularity[EOS] *= 6.0
    popularity = np.cumsum(popularity).tolist()
    # One cycle through all states, in random order, makes every word reachable from every other.
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
        weights[0] += 0.5  # the cycle may be the only way to a rare word: keep it from vanishing
        transitions[state, successors] = weights / np.cumsum(weights)[-1]
    return transitions


def stationary_distribution(transitions: np.ndarray) -> np.ndarray:
    """Return the pi [S] with pi P = pi and sum(pi) = 1 of an irreducible chain P [S, S]."""
    num_states = len(transitions)
    equations = transitions.T - np.eye(num_states)
    equations[-1] = 1.0  # any one balance equation follows from the others; sum(pi) = 1 replaces it
    return np.linalg.solve(equations, np.eye(num_states)[-1])


def entropy_rate(transitions: np.ndarray) -> float:
    """Return H = -sum_i pi_i sum_j P_ij log P_ij, nats per token, of a chain P [S, S].

    Source: Cover and Thomas, Elements of Information Theory, 2nd edition, theorem 4.2.4.
    """
    logs = np.log(transitions, where=transitions > 0, out=np.zeros_like(transitions))
    return float(-stationary_distribution(transitions) @ (transitions * logs).sum(axis=1))


def sample_states(transitions: np.ndarray, rng: np.random.Generator, min_tokens: int) -> list[int]:
    """Walk the chain from `<eos>`, ending at the first `<eos>` after `min_tokens` tokens.

    Returns:
      The states visited after the start, the last of them EOS.
    """
    successors = [np.flatnonzero(row).tolist() for row in transitions]
    # Inverse CDF per state; the last bound is left out, so that rounding cannot step past it.
    bounds = [np.cumsum(row[row > 0])[:-1].tolist() for row in transitions]
    states, state = [], EOS
    while True:
        # In blocks, which are the numbers of as many single draws in a quarter of the time.
        for draw in rng.random(10_000).tolist():
            state = successors[state][bisect.bisect_right(bounds[state], draw)]
            states.append(state)
            if state == EOS and len(states) >= min_tokens:
                return states


def text_perplexity(transitions: np.ndarray, states: list[int]) -> float:
    """Return exp(mean -log P) of `states` under the chain P [S, S], starting from `<eos>`."""
    return float(np.exp(-np.log(transitions[[EOS, *states[:-1]], states]).mean()))


def word_names(num_words: int) -> list[str]:
    """Return distinct pronounceable words, short ones first: `ba`, `be`, ..., `baba`, ..."""
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
) -> Truth:
    """Write the three splits and `truth.json` of a language, one sentence per line.

    The texts depend on the arguments alone and each file appears whole or not at all, so any
    number of processes may make the same call at once, and repeating it changes nothing.

    Args:
      directory: Made if missing.
      seed: Seed of the language and of its texts, at least 0.
      num_words: Words besides `<eos>`.
      num_successors: Tokens that may follow each token, 2 to `num_words`.
      train_tokens: Least length of the training text, in tokens, `<eos>` included; enough for
          every word to appear in it.
      eval_tokens: Least length of the validation text and of the test text, likewise.

    Returns:
      The true perplexities, which `truth.json` holds too.

    Raises:
      OSError: The directory cannot be written.
      UserError: The directory holds a corpus that this function did not write.
    """
    transitions = transition_matrix(seed, num_words, num_successors)
    # A generator for each text, so that the length of one does not change another.
    rngs = [np.random.Generator(np.random.PCG64([seed, stream])) for stream in (1, 2, 3)]
    train, valid, test = (
        sample_states(transitions, rng, min_tokens)
        for rng, min_tokens in zip(rngs, (train_tokens, eval_tokens, eval_tokens))
    )
    assert len(set(train)) == num_words + 1, "train_tokens is too few for all words"
    rate = entropy_rate(transitions)
    truth = Truth(
        entropy_rate_nats=rate,
        perplexity=math.exp(rate),
        valid_perplexity=text_perplexity(transitions, valid),
        test_perplexity=text_perplexity(transitions, test),
    )
    names = ["\n", *word_names(num_words)]
    texts = {
        f"{split}.txt": " ".join(names[s] for s in states).replace(" \n", "\n").replace("\n ", "\n")
        for split, states in (("train", train), ("valid", valid), ("test", test))
    }
    encoded = {name: text.encode("ascii") for name, text in texts.items()}
    _write_files(Path(directory), encoded, truth)
    return truth


def _write_files(directory: Path, texts: dict[str, bytes], truth: Truth) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    present = {n: (directory / n).read_bytes() for n in texts if (directory / n).exists()}
    changed = [name for name in texts if present.get(name) != texts[name]]
    mark = directory / "truth.json"
    for name in changed:
        if name in present and not mark.exists():
            raise UserError(f"{directory / name} is another corpus, which is not overwritten")
    for name in changed:
        files.write_atomically(str(directory / name), texts[name])
    if changed or not _tells(mark, truth):
        files.write_json(str(mark), dataclasses.asdict(truth))


def _tells(path: Path, truth: Truth) -> bool:
    """Whether a file holds these numbers, but for their last digits, which depend on the CPU."""
    try:
        stored = json.loads(path.read_bytes())
        return all(math.isclose(stored[n], v) for n, v in dataclasses.asdict(truth).items())
    except (OSError, ValueError, KeyError, TypeError):
        return False
