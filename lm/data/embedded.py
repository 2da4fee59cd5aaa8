"""Generate the embedded corpus, a random language whose perplexity is known exactly.

The text is a first-order Markov chain, and `<eos>` is one of its states. The true probabilities
give the lowest perplexity that a model can expect. The text is written as a stream, so that memory
contains only the chain.

The text must be the same on all machines and with all versions of NumPy. Everything that decides a
word therefore uses only PCG64's `random()`, the four IEEE operations of arithmetic and sequential
sums: no `choice`, no `log` or `pow`, no pairwise `sum`.
"""

import bisect
import dataclasses
import errno
import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm.data.splits import SPLITS
from lm.errors import UserError
from lm.files import open_atomically, sha256_of, temporary_directory
from lm.json_files import from_json, read_object, write_json
from lm.options import MAX_SEED, Checked, option

EOS = 0  # the state of `<eos>`; states 1, 2, ... are the words, roughly from frequent to rare
_TRUTH_FILE = "truth.json"
BLOCK_TOKENS = 10_000


class Language(NamedTuple):
    """A Markov chain with S states, each of which has K successors."""

    successors: np.ndarray  # int64 [S, K], in increasing order
    probabilities: np.ndarray  # float64 [S, K], of the successors
    cycle: np.ndarray  # int64 [S]: a path from `<eos>`, not included, through all words to `<eos>`


@dataclasses.dataclass(frozen=True)
class KnownPerplexity:
    """The content of truth.json.

    The perplexities are those of a perfect model. They count each `<eos>` as a token.
    """

    valid_perplexity: float
    test_perplexity: float
    sha256: Mapping[str, str]  # for each split
    options: Mapping[str, Any]  # dataclasses.asdict(LanguageOptions)


@dataclasses.dataclass(frozen=True)
class LanguageOptions(Checked):
    """The language and the lengths of its texts.

    A text of N tokens ends with the sentence of token N.
    """

    num_words: int = option(200, "number of words", low=2, high=10_000_000)
    num_successors: int = option(8, "number of tokens that may follow each token", low=2, high=256)
    num_tokens: int = option(400_000, "tokens of the training text, including <eos>", low=1)
    eval_tokens: int = option(20_000, "tokens of the validation text and the test text", low=1)
    seed: int = option(1, "seed of the language and of the texts", low=0, high=MAX_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_successors > self.num_words:
            raise UserError(
                f"num_successors is {self.num_successors} but num_words is {self.num_words}; it"
                " must be at most num_words"
            )


DEFAULT_OPTIONS = LanguageOptions()


def random_language(seed: int, num_words: int, num_successors: int) -> Language:
    """Sample the transition probabilities of a random language with num_words + 1 states."""
    random = np.random.Generator(np.random.PCG64(seed)).random
    num_states = num_words + 1
    # Zipf-like popularity, flattened at the head, creates frequent and rare words. `<eos>` is the
    # most frequent token, so that sentences have about fifteen tokens.
    popularity = 1.0 / (np.arange(num_states) + 20.0)
    popularity[EOS] *= 6.0
    *bounds, total = np.cumsum(popularity).tolist()
    # A cycle through all states, in random order, makes every word reachable from every word.
    cycle = np.argsort(random(num_states), kind="stable")
    next_on_cycle = dict(zip(cycle.tolist(), np.roll(cycle, -1).tolist()))
    language = Language(
        successors=np.empty((num_states, num_successors), np.int64),
        probabilities=np.empty((num_states, num_successors)),
        cycle=np.roll(cycle, -1 - np.flatnonzero(cycle == EOS)[0]),
    )
    for state in range(num_states):
        successors = [next_on_cycle[state]]
        while len(successors) < num_successors:
            drawn = bisect.bisect_right(bounds, random() * total)
            if drawn not in successors and not drawn == state == EOS:  # no empty lines
                successors.append(drawn)
        weights = random(num_successors) + 0.1
        weights[0] += 0.5  # the cycle may be the only path to a rare word
        order = np.argsort(successors)
        language.successors[state] = np.array(successors)[order]
        language.probabilities[state] = (weights / np.cumsum(weights)[-1])[order]
    return language


def sample_states(
    language: Language, rng: np.random.Generator, min_tokens: int
) -> Iterator[list[int]]:
    """Sample blocks of states from `<eos>`, not included, to the `<eos>` after `min_tokens`."""
    successors = language.successors.tolist()
    # The inverse CDF of each state, without the last bound, which rounding could exceed.
    bounds = np.cumsum(language.probabilities, axis=1)[:, :-1].tolist()
    state, missing = EOS, min_tokens
    while True:
        states: list[int] = []
        # A block of draws gives the same numbers as single draws, in a quarter of the time.
        for draw in rng.random(BLOCK_TOKENS).tolist():
            state = successors[state][bisect.bisect_right(bounds[state], draw)]
            states.append(state)
            if state == EOS and len(states) >= missing:
                yield states
                return
        missing -= len(states)
        yield states


def with_every_word(blocks: Iterator[list[int]], language: Language) -> Iterator[list[int]]:
    """Append the cycle to a sample if words are missing, so that no word is unknown."""
    occurs = np.zeros(len(language.successors), bool)
    for states in blocks:
        occurs[states] = True
        yield states
    if not occurs.all():
        yield language.cycle.tolist()


def negative_log_likelihood(language: Language, states: Sequence[int]) -> float:
    """Return the sum of -log P over all states except the first."""
    previous, following = np.array(states[:-1]), np.array(states[1:])
    is_next = language.successors[previous] == following[:, None]
    return -float(np.log(language.probabilities[previous][is_next]).sum())


def word_names(num_words: int) -> list[str]:
    """Return distinct pronounceable words, shortest first: `ba`, `be`, ..., `baba`, ..."""
    syllables = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
    lengths = itertools.count(1)
    names = ("".join(w) for n in lengths for w in itertools.product(syllables, repeat=n))
    return list(itertools.islice(names, num_words))


def write_corpus(directory: str, options: LanguageOptions = DEFAULT_OPTIONS) -> KnownPerplexity:
    """Create a directory with the three splits of a language and `truth.json`.

    Each line of a text is a sentence. The directory appears when it is complete. If it already
    contains this corpus, it stays unchanged.

    Raises:
      UserError: If the directory exists, and does not contain this corpus.
    """
    directory = os.path.realpath(directory)
    if not os.path.exists(directory):
        parent = os.path.dirname(directory)
        os.makedirs(parent, exist_ok=True)
        with temporary_directory(parent, ".corpus-") as staging:
            corpus = os.path.join(staging, "corpus")
            os.mkdir(corpus)  # with the permissions of the umask; `staging` is private
            _write_files(corpus, options)
            try:
                os.rename(corpus, directory)
            except OSError as error:  # Another process may have created the directory.
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
    paths = {split: os.path.join(directory, f"{split}.txt") for split in SPLITS}
    sha256 = {split: sha256_of(path) for split, path in paths.items() if os.path.exists(path)}
    truth = load_known_perplexity(directory, sha256)
    if truth is None or truth.options != dataclasses.asdict(options):
        raise UserError(
            f"{directory} exists, but does not contain the synthetic corpus of these settings: move"
            " it away, or choose a new directory"
        )
    return truth


def load_known_perplexity(directory: str, sha256: Mapping[str, str]) -> KnownPerplexity | None:
    """Return the known perplexity of texts, or None if `write_corpus` did not write them."""
    path = os.path.join(directory, _TRUTH_FILE)
    try:
        content = read_object(path)
        truth = content and from_json(KnownPerplexity, content, path)
    except UserError:  # The user's own directory may contain another file of this name.
        return None
    return truth if truth and truth.sha256 == sha256 else None


def _write_files(directory: str, options: LanguageOptions) -> None:
    language = random_language(options.seed, options.num_words, options.num_successors)
    sha256, perplexities = {}, {}
    for stream, split in enumerate(SPLITS, 1):
        # Each split has a separate generator, so that its content does not depend on the length of
        # the previous split.
        rng = np.random.Generator(np.random.PCG64([options.seed, stream]))
        if split == "train":
            sample = with_every_word(sample_states(language, rng, options.num_tokens), language)
        else:
            sample = sample_states(language, rng, options.eval_tokens)
        path = os.path.join(directory, f"{split}.txt")
        sha256[split], perplexities[split] = _write_text(path, language, sample)
    given = dataclasses.asdict(options)
    truth = KnownPerplexity(perplexities["valid"], perplexities["test"], sha256, given)
    write_json(os.path.join(directory, _TRUTH_FILE), dataclasses.asdict(truth))


def _write_text(path: str, language: Language, sample: Iterator[list[int]]) -> tuple[str, float]:
    """Write a text, and return its SHA-256 and its perplexity under the language."""
    names = ["\n", *(f" {name}" for name in word_names(len(language.successors) - 1))]
    digest, nll, num_tokens, last = hashlib.sha256(), 0.0, 0, EOS
    with open_atomically(path) as file:
        for states in sample:
            text = "".join([names[state] for state in states]).replace("\n ", "\n")
            block = (text.removeprefix(" ") if last == EOS else text).encode("ascii")
            file.write(block)
            digest.update(block)
            nll += negative_log_likelihood(language, [last, *states])
            num_tokens, last = num_tokens + len(states), states[-1]
    # The last digits depend on the CPU. Rounding makes `truth.json` the same on all machines.
    return digest.hexdigest(), round(float(np.exp(nll / num_tokens)), 9)
