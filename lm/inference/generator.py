"""Text generation: drawn texts, beam search, and the most probable next tokens.

Shapes: B rows, S numbers of a row's state, V tokens of the vocabulary.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.errors import UserError
from lm.inference.beam import beam_search
from lm.inference.prompts import contains_at_end, decode_stream, encode_prompt
from lm.inference.sampling import Sampling, largest, next_word_distribution, scores_of_tokens
from lm.inference.trained_run import Run, check_words, open_session
from lm.model import decoding
from lm.model.network import Network
from lm.model.ops import fastest
from lm.model.sampler import draw

_NUM_EXPECTED = 5  # tokens in a prediction


class Generated(NamedTuple):
    """A generated text."""

    prompt: str  # its decoded tokens
    text: str  # continues the prompt
    log_probability: float  # natural logarithm, of all generated tokens


class Prediction(NamedTuple):
    """The prediction of a token of a text."""

    text: str  # the characters that the token completes
    bits: float  # the surprisal: the negative log2-probability
    expected: list[tuple[str, float]]  # the most probable tokens, with their probabilities


@dataclasses.dataclass
class _Draft:
    """A text that is being generated."""

    prompt: Sequence[int]
    unread: collections.deque[int]  # tokens that the network has not read yet
    random: Callable[[], float]
    tokens: list[int] = dataclasses.field(default_factory=list)  # generated tokens
    log_prob: float = 0.0  # the sum over the generated tokens
    is_done: bool = False
    likely: list[tuple[str, float]] | None = None  # the most probable next tokens


class Generator:
    """Generates texts with the network of a run.

    Other rows change the results of a row only by rounding. With the compiled operations, only the
    softmax of the built-in network depends on them.

    Args:
      rows: The number of texts that are generated together, at least the size of a beam. A
        user-defined network may need a known number of rows, so it always computes this number.
    """

    def __init__(self, run: Run, rows: int = 1):
        check_words(run)
        self._tokenizer, self._functions, self.rows = run.tokenizer, run.functions, rows
        self.any_rows = run.functions.is_built_in
        self._session, self._step = open_session(run, self._build)

    def _build(self, network: Network) -> tuple:
        rows = None if self.any_rows else self.rows
        self._words_ph = tf.placeholder(tf.int32, [rows])
        self._state_ph = tf.placeholder(tf.float32, [rows, decoding.state_size(network)])
        self._reads_words = bool(network.reads_words)
        return decoding.next_word(network, self._words_ph, self._state_ph, fastest())

    def close(self) -> None:
        self._session.close()

    def generate(
        self, prompts: Sequence[str], how: Sampling, first: int = 0
    ) -> Iterator[Generated]:
        """Generate `num_samples` texts for each prompt, in the order of the prompts.

        `first` is the position of the first prompt. A text depends only on the seed, the prompt,
        its position and the index of the sample. If a prompt causes an error, the texts of the
        prompts before it are generated.
        """
        encoded, error = self.encode(prompts, first)
        yield from self.continue_all(encoded, how, first)
        if error:
            raise error

    def continue_all(
        self, encoded: Sequence[list[int]], how: Sampling, first: int = 0
    ) -> Iterator[Generated]:
        """Generate texts like `generate`, for prompts as token IDs."""
        started: collections.deque[_Draft] = collections.deque()

        def start() -> Iterator[_Draft]:
            for position, prompt_ids in enumerate(encoded, first):
                for sample in range(how.num_samples):
                    started.append(self._draft(prompt_ids, (how.seed, sample, position)))
                    yield started[-1]

        if how.beam_size:
            for prompt_ids in encoded:
                yield from self._search(prompt_ids, how)
        else:
            for _ in self._sample(start(), how):
                while started and started[0].is_done:
                    draft = started.popleft()
                    yield self._finished(draft.prompt, draft.tokens, draft.log_prob, how)

    def stream(self, prompt: str, how: Sampling) -> Iterator[str]:
        """Generate one text, and yield its pieces, which start with the prompt.

        A piece appears as soon as its characters are complete.
        """
        draft = self._draft(encode_prompt(prompt, self._tokenizer), (how.seed, 0, 0))
        new_tokens = (draft.tokens[-1] for draft in self._sample([draft], how))
        return decode_stream(self._tokenizer, itertools.chain(draft.prompt, new_tokens))

    def next_tokens(
        self, prompts: Sequence[str], count: int, first: int = 0
    ) -> Iterator[list[tuple[str, float]]]:
        """Yield the most probable tokens after each prompt, with their probabilities."""
        encoded, error = self.encode(prompts, first)
        drafts = [self._draft(prompt_ids) for prompt_ids in encoded]
        for draft, log_probs_V in self._read(drafts):
            best = largest(scores_of_tokens(log_probs_V), count)
            draft.likely = list(zip(map(self._name, best), np.exp(log_probs_V[best]).tolist()))
        yield from (draft.likely for draft in drafts)
        if error:
            raise error

    def predictions(self, ids: Iterable[int]) -> Iterator[Prediction]:
        """Yield a prediction of each token of a text, which starts with an empty state."""
        ids = list(ids)
        previous, state_1S = self._tokenizer.eos_id, self._zeros(1)
        for token, text in zip(ids, decode_stream(self._tokenizer, ids)):
            log_probs_1V, state_1S = self._run([previous], state_1S)
            log_probs_V = log_probs_1V[0].astype(np.float64)
            best = largest(log_probs_V, _NUM_EXPECTED)
            expected = [(self._name(each), np.exp(log_probs_V[each])) for each in best]
            yield Prediction(text, -log_probs_V[token] / np.log(2), expected)
            previous = token

    def _name(self, token: int) -> str:
        """Return the characters of a token, or its name if other tokens have the same characters.

        These are tokens with a part of a character, and tokens that start a word (SentencePiece).
        """
        text, name = self._tokenizer.decode([token]), self._tokenizer.tokens[token]
        return name if "\ufffd" in text or name.startswith("\u2581") else text

    def encode(
        self, prompts: Iterable[str], first: int = 0
    ) -> tuple[list[list[int]], UserError | None]:
        """Return the token IDs of the prompts before the first invalid prompt, and its error."""
        found: list[list[int]] = []
        for position, prompt in enumerate(prompts, first):
            try:
                found.append(encode_prompt(prompt, self._tokenizer, position))
            except UserError as error:
                return found, error
        return found, None

    def _draft(self, prompt: Sequence[int], seed: Sequence[int] = (0,)) -> _Draft:
        unread = collections.deque([self._tokenizer.eos_id, *prompt])
        return _Draft(prompt, unread, np.random.Generator(np.random.PCG64(seed)).random)

    def _finished(
        self, prompt_ids: Sequence[int], tokens: Sequence[int], log_prob: float, how: Sampling
    ) -> Generated:
        prompt = self._tokenizer.decode(prompt_ids)
        text = self._tokenizer.decode([*prompt_ids, *tokens])[len(prompt) :]
        if how.stop:
            text = text.partition(how.stop)[0]
        return Generated(prompt, text, log_prob)

    def _start(self, unread: collections.deque[int]) -> np.ndarray:
        """Return the state before the unread tokens of a text, [1, S].

        If a state consists of the last words, only the last unread token needs a computation, so
        the other tokens are moved into the state.
        """
        moved = [unread.popleft() for _ in range(len(unread) - 1)] if self._reads_words else []
        return decoding.state_of_words(moved, self._state_ph.shape.as_list()[1])[None]

    def _zeros(self, rows: int) -> np.ndarray:
        """Return empty states, [B, S]."""
        return np.zeros([rows, self._state_ph.shape.as_list()[1]], np.float32)

    def _run(
        self, words: Sequence[int], state_BS: np.ndarray, predicts: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities after a token in each row, [B, V], and the new state.

        If `predicts` is False, the log-probabilities are not computed, because the softmax takes
        most of the time.
        """
        rows = len(words)
        unused = (self._words_ph.shape.as_list()[0] or rows) - rows
        if unused:
            words = [*words, *[0] * unused]
            state_BS = np.concatenate([state_BS, self._zeros(unused)])
        feed = {self._words_ph: words, self._state_ph: state_BS}
        fetches = self._step if predicts else self._step[1:]
        with self._functions.one_line_errors(running=True):
            *log_probs, state_BS = self._session.run(fetches, feed)
        return (log_probs[0][:rows] if predicts else np.empty([0, 0])), state_BS[:rows]

    def _read(self, drafts: Iterable[_Draft]) -> Iterator[tuple[_Draft, np.ndarray]]:
        """Yield each text whose tokens have all been read, and the log-probabilities after it, [V].

        The caller may then add tokens to the text, which are read too. Otherwise, the next text
        takes over the row.
        """
        waiting, rows, state_BS = iter(drafts), [], self._zeros(0)
        while True:
            kept = [row for row, draft in enumerate(rows) if draft.unread]
            new = list(itertools.islice(waiting, self.rows - len(kept)))
            if new or len(kept) < len(rows):
                rows = [*(rows[row] for row in kept), *new]
                state_BS = np.concatenate([state_BS[kept], *(self._start(d.unread) for d in new)])
            if not rows:
                return
            words = [draft.unread.popleft() for draft in rows]
            predicts = not all(draft.unread for draft in rows)
            log_probs_BV, state_BS = self._run(words, state_BS, predicts)
            for draft, log_probs_V in zip(rows, log_probs_BV):
                if not draft.unread:
                    yield draft, log_probs_V

    def _sample(self, drafts: Iterable[_Draft], how: Sampling) -> Iterator[_Draft]:
        """Draw the tokens of texts, and yield a text each time it has a new token."""
        for draft, log_probs_V in self._read(drafts):
            scores_V = self._scores(log_probs_V, [*draft.prompt, *draft.tokens], how)
            token = draw(next_word_distribution(scores_V, how), draft.random())
            draft.tokens.append(token)
            draft.log_prob += float(log_probs_V[token])
            draft.is_done = self._ends(draft.tokens, how)
            if not draft.is_done:
                draft.unread.append(token)
            yield draft

    def _search(self, prompt: Sequence[int], how: Sampling) -> Iterator[Generated]:
        """Yield the `num_samples` texts with the best scores, best first."""
        unread = collections.deque([self._tokenizer.eos_id, *prompt])
        state_BS = self._start(unread)
        while unread:
            log_probs_BV, state_BS = self._run([unread.popleft()], state_BS, not unread)

        def advance(rows: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
            nonlocal state_BS
            log_probs_BV, state_BS = self._run(tokens, state_BS[rows])
            return log_probs_BV

        def score(log_probs_V: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
            return self._scores(log_probs_V, [*prompt, *tokens], how)

        found = beam_search(log_probs_BV, advance, score, lambda ids: self._ends(ids, how), how)
        for text in found[: how.num_samples]:
            yield self._finished(prompt, text.tokens, text.log_prob, how)

    def _scores(self, log_probs_V: np.ndarray, seen: Sequence[int], how: Sampling) -> np.ndarray:
        unk_id = self._tokenizer.unk_id
        banned = [] if how.allow_unk or unk_id is None else [unk_id]
        return scores_of_tokens(log_probs_V, how.repetition_penalty, seen, banned)

    def _ends(self, tokens: Sequence[int], how: Sampling) -> bool:
        """Return whether a text ends after these generated tokens."""
        if len(tokens) == how.num_words:
            return True
        if how.stop_at_eos and tokens[-1] == self._tokenizer.eos_id:
            return True
        if how.stop_at_eos and "\n" in self._tokenizer.decode(tokens[-1:]):  # such as ".\n"
            return True
        return bool(how.stop) and contains_at_end(self._tokenizer, tokens, how.stop)
