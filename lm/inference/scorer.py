"""Log-probabilities of sentences, computed as soon as the sentences arrive."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.distributed.devices import Device
from lm.errors import UserError
from lm.inference.trained_run import Run, check_words, open_session
from lm.model import decoding
from lm.model.network import Network
from lm.model.ops import fastest


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

    All batches have `batch_size` rows, and the last rows of a batch may be empty. With the compiled
    operations, a score of the built-in network does not depend on its row or on the other rows.
    Otherwise, they change a score by rounding, and other sizes of the batch would change more.
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
        self._session, self._results = open_session(run, self._build, device)
        self._state = np.zeros(self._state_ph.shape.as_list(), np.float32)
        self._last_id = run.tokenizer.eos_id

    def _build(self, network: Network) -> tuple[tf.Tensor, tf.Tensor]:
        self._inputs_ph = tf.placeholder(tf.int32, [None, self.rows])
        self._targets_ph = tf.placeholder(tf.int32, [None, self.rows])
        self._state_ph = tf.placeholder(tf.float32, [self.rows, decoding.state_size(network)])
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
        batch: list[tuple[str, list[int]]] = []
        try:
            for number, sentence in enumerate(sentences, first):
                try:
                    batch.append((sentence, self._tokenizer.encode(sentence + "\n")))
                except UserError as error:
                    raise UserError(f"{place} {number}: {error}") from error
                if len(batch) == self.rows:
                    full, batch = batch, []
                    yield from self._score_batch(full)
        except UserError:
            yield from self._score_batch(batch)
            raise
        yield from self._score_batch(batch)

    def close(self) -> None:
        self._session.close()

    def _score_batch(self, batch: Sequence[tuple[str, list[int]]]) -> Iterator[Score]:
        longest = max((len(ids) for _, ids in batch), default=0)
        targets = np.full([longest, self.rows], self._tokenizer.eos_id, np.int32)
        for row, (_, ids) in enumerate(batch):
            targets[: len(ids), row] = ids
        # Texts of token IDs may be empty.
        log_probs = self._log_probs(targets) if longest else np.empty(targets.shape)
        for row, (sentence, ids) in enumerate(batch):
            unknown = len(self._tokenizer.unknown(sentence))
            found = log_probs[: len(ids), row].astype(np.float64)
            score = Score(sentence, targets[: len(ids), row], found, unknown)
            if math.isnan(score.log_prob):  # A user-defined network may fail on one word.
                raise UserError("the network returns NaN: use a different checkpoint")
            yield score

    def _log_probs(self, targets: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of the targets, int32 [T, B]."""
        inputs = np.concatenate([np.full_like(targets[:1], self._last_id), targets[:-1]])
        feed = {
            self._inputs_ph: inputs,
            self._targets_ph: targets,
            self._state_ph: self._state,
        }
        with self._functions.one_line_errors(running=True):
            log_probs, state = self._session.run(self._results, feed)
        if self._continuous:
            self._state, self._last_id = state, targets[-1, 0]
        return log_probs
