"""Log-probabilities of sentences, computed as soon as the sentences arrive."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.distributed.devices import Device
from lm.errors import UserError
from lm.inference.trained_run import Run, check_words, open_session
from lm.model import decoding
from lm.model.network import Network
from lm.model.ops import fastest

_NUM_SORTED = 16  # batches whose sentences are sorted by their length
_CHUNK_STEPS = 256  # time steps between two calls of `poll`


class Score(NamedTuple):
    """The score of a sentence."""

    text: str  # the sentence
    ids: np.ndarray  # int32, of the tokens and of the line end
    log_probs: np.ndarray  # float64, natural, of each token and of the line end
    unknown: int  # number of words that are not in the vocabulary and are scored as <unk>

    @property
    def log_prob(self) -> float:
        """The natural log-probability of the sentence, including its line end."""
        return float(self.log_probs.sum())


class Scorer:
    """Scores sentences with the network of a run.

    With the compiled operations, a score of the built-in network does not depend on its row or on
    the other rows. Sentences of similar length are then scored together, and a batch has only as
    many rows as sentences. Otherwise, the other rows change a score by rounding, and a different
    batch size would change it more. All batches then have `batch_size` rows, and the last rows may
    be empty.
    """

    def __init__(
        self,
        run: Run,
        batch_size: int = 16,
        continuous: bool = False,
        device: Device | None = None,
    ):
        """Open a session. If `continuous`, the state of a sentence continues in the next one."""
        check_words(run, device)
        self._tokenizer, self._functions = run.tokenizer, run.functions
        self.rows, self._continuous = 1 if continuous else batch_size, continuous
        self.any_rows = run.functions.is_built_in and kernels.available()
        self.poll: Callable[[], None] = lambda: None  # called after each part of a batch
        self._session, self._results = open_session(run, self._build, device)
        self._state, self._last_id = None, run.tokenizer.eos_id

    @property
    def num_sorted(self) -> int:
        """The number of sentences that are sorted and scored together."""
        return self.rows * (_NUM_SORTED if self.any_rows and not self._continuous else 1)

    def _build(self, network: Network) -> tuple[tf.Tensor, tf.Tensor]:
        rows = None if self.any_rows else self.rows
        # A network that reads words computes the first words of a chunk together.
        self._chunk_steps = max(_CHUNK_STEPS, network.reads_words or 0)
        self._inputs_ph = tf.placeholder(tf.int32, [None, rows])
        self._targets_ph = tf.placeholder(tf.int32, [None, rows])
        self._state_ph = tf.placeholder(tf.float32, [rows, decoding.state_size(network)])
        return decoding.continued_log_probs(
            network,
            self._inputs_ph,
            self._targets_ph,
            self._state_ph,
            functools.partial(decoding.window_losses, ops=fastest()),
        )

    def score(
        self, sentences: Iterable[str], place: str = "text", first: int = 1
    ) -> Iterator[Score]:
        """Score sentences, each to its line end, and from an empty state unless `continuous`.

        If a sentence causes an error, the sentences before it are scored. The message starts with
        the place and the number of the sentence, which are counted from `first`.
        """
        texts: list[tuple[str, list[int]]] = []
        try:
            for number, sentence in enumerate(sentences, first):
                try:
                    texts.append((sentence, self._tokenizer.encode(sentence + "\n")))
                except UserError as error:
                    raise UserError(f"{place} {number}: {error}") from error
                if len(texts) == self.num_sorted:
                    full, texts = texts, []
                    yield from self._score_texts(full)
        except UserError:
            yield from self._score_texts(texts)
            raise
        yield from self._score_texts(texts)

    def close(self) -> None:
        self._session.close()

    def _score_texts(self, texts: Sequence[tuple[str, list[int]]]) -> Iterator[Score]:
        order = list(range(len(texts)))
        if self.any_rows:
            order.sort(key=lambda index: len(texts[index][1]))
        found: dict[int, np.ndarray] = {}
        for start in range(0, len(order), self.rows):
            batch = order[start : start + self.rows]
            found.update(zip(batch, self._score_batch([texts[index][1] for index in batch])))
        for index, (sentence, ids) in enumerate(texts):
            unknown = len(self._tokenizer.unknown(sentence))
            score = Score(sentence, np.array(ids, np.int32), found[index], unknown)
            if math.isnan(score.log_prob):  # A user-defined network may fail on one word.
                raise UserError("the network returns NaN: use a different checkpoint")
            yield score

    def _score_batch(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-probabilities of each text, float64."""
        rows = len(texts) if self.any_rows else self.rows
        targets = np.full([max(map(len, texts)), rows], self._tokenizer.eos_id, np.int32)
        for row, ids in enumerate(texts):
            targets[: len(ids), row] = ids
        # Texts of token IDs may be empty.
        log_probs = self._log_probs(targets) if len(targets) else np.empty(targets.shape)
        return [log_probs[: len(ids), row].astype(np.float64) for row, ids in enumerate(texts)]

    def _log_probs(self, targets: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of the targets, int32 [T, B]."""
        inputs = np.concatenate([np.full_like(targets[:1], self._last_id), targets[:-1]])
        state, log_probs = self._state, []
        if state is None:
            state = np.zeros([targets.shape[1], self._state_ph.shape.as_list()[1]], np.float32)
        for start in range(0, len(targets), self._chunk_steps):
            chunk = slice(start, start + self._chunk_steps)
            feed = {
                self._inputs_ph: inputs[chunk],
                self._targets_ph: targets[chunk],
                self._state_ph: state,
            }
            with self._functions.one_line_errors(running=True):
                found, state = self._session.run(self._results, feed)
            log_probs.append(found)
            self.poll()
        if self._continuous:
            self._state, self._last_id = state, targets[-1, 0]
        return np.concatenate(log_probs)
