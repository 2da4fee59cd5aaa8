"""Text generation: drawn texts, beam search, and the most probable next tokens.

Shapes: B rows, V tokens of the vocabulary.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm import logger
from lm.data.tokenizers import Tokenizer
from lm.data.vocabulary import UNK
from lm.inference.beam import Hypothesis, beam_search
from lm.inference.sampling import Sampling, draw, next_word_distribution, scores_of_tokens
from lm.inference.trained_run import Run, check_words, open_session
from lm.model import decoding
from lm.model.network import Network
from lm.model.ops import fastest

_WINDOW = 8  # number of complete parts of a text that are decoded again with each new token


class Generated(NamedTuple):
    """A generated text."""

    prompt: str
    text: str  # continues the prompt
    log_probability: float  # natural logarithm, of all generated tokens


@dataclasses.dataclass
class _Draft:
    """A text that is being generated."""

    prompt: Sequence[int]
    unread: collections.deque[int]  # tokens that the network has not read yet
    random: Callable[[], float]
    tokens: list[int] = dataclasses.field(default_factory=list)  # generated tokens
    log_prob: float = 0.0  # of the generated tokens
    is_done: bool = False


class Generator:
    """Generates texts with the network of a run.

    All calls of the network have `rows` rows. If the compiled operations are available, the results
    of the built-in network for a row do not depend on the other rows. Otherwise, they are equal up
    to rounding.
    """

    def __init__(self, run: Run, rows: int = 1):
        check_words(run)
        self._tokenizer, self._functions, self._rows = run.tokenizer, run.functions, rows
        self._session, self._step = open_session(run, self._build)

    def _build(self, network: Network) -> tuple:
        self._words_ph = tf.placeholder(tf.int32, [self._rows])
        self._state_ph = tf.placeholder(tf.float32, [self._rows, decoding.state_size(network)])
        return decoding.next_word(network, self._words_ph, self._state_ph, fastest())

    def close(self) -> None:
        self._session.close()

    def generate(
        self, prompts: Sequence[str], how: Sampling, first: int = 0
    ) -> Iterator[Generated]:
        """Generate `num_samples` texts for each prompt, in the order of the prompts.

        `first` is the position of the first prompt. A text depends only on the seed, the prompt,
        its position and the index of the sample.
        """
        if how.beam_size:
            for prompt in prompts:
                ids = encode_prompt(prompt, self._tokenizer)
                for found in self._search(ids, how)[: how.num_samples]:
                    yield self._finished(ids, found.tokens, found.log_prob, how)
            return
        drafts = [
            self._draft(prompt, (how.seed, sample, position))
            for position, prompt in enumerate(prompts, first)
            for sample in range(how.num_samples)
        ]
        waiting = collections.deque(drafts)
        for _ in self._sample(drafts, how):
            while waiting and waiting[0].is_done:
                draft = waiting.popleft()
                yield self._finished(draft.prompt, draft.tokens, draft.log_prob, how)

    def stream(self, prompt: str, how: Sampling) -> Iterator[str]:
        """Generate one text, and yield its pieces, which start with the prompt.

        A piece appears as soon as its characters are complete.
        """
        draft = self._draft(prompt, (how.seed, 0, 0))
        new_tokens = (draft.tokens[-1] for draft in self._sample([draft], how))
        return decode_stream(self._tokenizer, itertools.chain(draft.prompt, new_tokens))

    def next_tokens(self, prompts: Sequence[str], count: int) -> Iterator[list[tuple[str, float]]]:
        """Yield the most probable tokens after each prompt, with their probabilities."""
        drafts = [self._draft(prompt) for prompt in prompts]
        found = {}  # the lists, because the arrays of all drafts would need much memory
        for draft, log_probs_V in self._read(drafts):
            best = np.argsort(-log_probs_V, kind="stable")[:count]
            tokens = [self._tokenizer.decode([token]) for token in best]
            found[id(draft)] = list(zip(tokens, np.exp(log_probs_V[best]).tolist()))
        yield from (found.pop(id(draft)) for draft in drafts)

    def _draft(self, prompt: str, seed: Sequence[int] = (0,)) -> _Draft:
        ids = encode_prompt(prompt, self._tokenizer)
        unread = collections.deque([self._tokenizer.eos_id, *ids])
        return _Draft(ids, unread, np.random.Generator(np.random.PCG64(seed)).random)

    def _finished(
        self, prompt_ids: Sequence[int], tokens: Sequence[int], log_prob: float, how: Sampling
    ) -> Generated:
        prompt = self._tokenizer.decode(prompt_ids)
        text = self._tokenizer.decode([*prompt_ids, *tokens])[len(prompt) :]
        if how.stop:
            text = text.partition(how.stop)[0]
        return Generated(prompt, text, log_prob)

    def _run(self, words: Sequence[int], state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities after a token in each row, [B, V], and the new state."""
        with self._functions.one_line_errors(running=True):
            return self._session.run(self._step, {self._words_ph: words, self._state_ph: state})

    def _read(self, drafts: Iterable[_Draft]) -> Iterator[tuple[_Draft, np.ndarray]]:
        """Yield each text whose tokens have all been read, and the log-probabilities after it, [V].

        The caller may then add tokens to the text, which are read too. Otherwise, the next text
        takes over the row.
        """
        waiting, rows = iter(drafts), [None] * self._rows
        state = np.zeros(self._state_ph.shape.as_list(), np.float32)
        while True:
            for row, draft in enumerate(rows):
                if draft is None or not draft.unread:
                    rows[row], state[row] = next(waiting, None), 0
            if not any(rows):
                return
            eos_id = self._tokenizer.eos_id
            words = [draft.unread.popleft() if draft else eos_id for draft in rows]
            log_probs_BV, state = self._run(words, state)
            for draft, log_probs_V in zip(rows, log_probs_BV):
                if draft and not draft.unread:
                    yield draft, log_probs_V

    def _sample(self, drafts: Iterable[_Draft], how: Sampling) -> Iterator[_Draft]:
        """Draw the tokens of texts, and yield a text each time it has a new token."""
        banned = self._banned(how)
        for draft, log_probs_V in self._read(drafts):
            scores_V = scores_of_tokens(log_probs_V, how, [*draft.prompt, *draft.tokens], banned)
            token = draw(next_word_distribution(scores_V, how), draft.random())
            draft.tokens.append(token)
            draft.log_prob += float(log_probs_V[token])
            draft.is_done = self._ends(draft.tokens, how)
            if not draft.is_done:
                draft.unread.append(token)
            yield draft

    def _search(self, prompt: Sequence[int], how: Sampling) -> list[Hypothesis]:
        """Return the texts with the best scores, best first."""
        state = np.zeros(self._state_ph.shape.as_list(), np.float32)
        for token in [self._tokenizer.eos_id, *prompt]:
            log_probs_BV, state = self._run([token] * self._rows, state)

        def advance(rows: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
            nonlocal state
            unused = [0] * (self._rows - len(rows))
            log_probs_BV, state = self._run([*tokens, *unused], state[[*rows, *unused]])
            return log_probs_BV

        return beam_search(log_probs_BV, advance, prompt, how, self._banned(how), self._ends)

    def _banned(self, how: Sampling) -> list[int]:
        unk_id = self._tokenizer.unk_id
        return [] if how.allow_unk or unk_id is None else [unk_id]

    def _ends(self, tokens: Sequence[int], how: Sampling) -> bool:
        """Return whether a text ends after these generated tokens."""
        if len(tokens) == how.num_words:
            return True
        if how.stop_at_eos and tokens[-1] == self._tokenizer.eos_id:
            return True
        return bool(how.stop) and how.stop in self._tokenizer.decode(tokens)


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token IDs of a prompt, and log its unknown words."""
    unknown = dict.fromkeys(tokenizer.unknown(prompt))
    ids = tokenizer.encode(prompt)
    if unknown:
        logger.warning("not in the vocabulary, read as %s: %s", UNK, ", ".join(unknown))
    return ids


def decode_stream(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yield the characters that each token completes, and then the rest of the text."""
    # The window must not start inside a character. Otherwise, some decoders would replace all
    # bytes that follow.
    complete: collections.deque[list[int]] = collections.deque(maxlen=_WINDOW)
    window: list[int] = []
    shown, num_shown = "", 0
    for token in ids:
        window.append(token)
        text = tokenizer.decode(window)
        if text.endswith("\ufffd"):  # the last character may be incomplete
            yield ""
        else:
            yield text[len(shown) :]
            complete.append(window[num_shown:])
            window = list(itertools.chain.from_iterable(complete))
            shown, num_shown = tokenizer.decode(window), len(window)
    yield tokenizer.decode(window)[len(shown) :]
