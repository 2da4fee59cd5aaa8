"""Log-probabilities of sentences, computed as soon as the sentences arrive."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.errors import UserError
from lm.inference.run import Run, open_session
from lm.model import decoding
from lm.model.network import Network
from lm.model.user_errors import one_line_errors

_BLOCK_BYTES = 1 << 16


class Score(NamedTuple):
    """The score of a sentence."""

    words: Sequence[str]  # without the closing <eos>
    log_probs: np.ndarray  # float64, natural, of each word and of the closing <eos>
    unknown: int  # words that are not in the vocabulary and are scored as <unk>

    @property
    def log_prob(self) -> float:
        """The natural log-probability of the sentence, including its closing `<eos>`."""
        return float(self.log_probs.sum())


class Scorer:
    """Scores sentences with the network of a run.

    Every batch has the same number of rows, some of which may be empty. Products of different sizes
    are rounded differently, so a score would otherwise depend on the other sentences of its batch.
    The score still depends on the row up to rounding: without AVX-512, TensorFlow sums the last
    rows in a different order.

    Args:
      run: The run.
      batch_size: Number of sentences in a batch.

    Raises:
      UserError: If the checkpoint does not fit the config of the run.
    """

    def __init__(self, run: Run, batch_size: int = 16):
        assert batch_size > 0
        self._vocabulary, self._rows, self._functions = run.vocabulary, batch_size, run.functions
        self._session, self._log_probs = open_session(run, self._build)

    def _build(self, network: Network) -> tf.Tensor:
        self._inputs_ph = tf.placeholder(tf.int32, [None, self._rows])
        self._targets_ph = tf.placeholder(tf.int32, [None, self._rows])
        return decoding.target_log_probs(network, self._inputs_ph, self._targets_ph)

    def score_stream(self, descriptor: int) -> Iterator[Score]:
        """Score the lines of a file, a pipe or a terminal, each as soon as it is complete.

        Raises:
          UserError: See `score`; or if a line is not UTF-8. The message names the line.
        """
        number = 0
        for lines in read_lines(descriptor):
            try:
                for score in self.score(map(_decode, lines, itertools.count(number))):
                    yield score
                    number += 1
            except UserError as error:
                raise UserError(f"line {number + 1} of the input: {error}") from error

    def score(self, sentences: Iterable[str]) -> Iterator[Score]:
        """Score sentences, each from an empty recurrent state to its closing `<eos>`.

        Raises:
          UserError: If a word is unknown and the vocabulary has no `<unk>`, or if the network
            returns NaN. The scores of the sentences before this sentence are yielded first.
        """
        sentences, failure = iter(sentences), None
        while failure is None:
            batch, ids = [], []
            try:
                for sentence in itertools.islice(sentences, self._rows):
                    words = sentence.split()
                    ids.append(self._vocabulary.encode(words))
                    batch.append(words)
            except UserError as error:
                failure = error
            if batch:
                yield from self._score_batch(batch, ids)
            elif failure is None:
                return
        raise failure

    def close(self) -> None:
        """Close the session."""
        self._session.close()

    def _score_batch(
        self, batch: Sequence[Sequence[str]], ids: Sequence[Sequence[int]]
    ) -> Iterator[Score]:
        eos_id = self._vocabulary.eos_id
        targets = np.full([1 + max(map(len, ids)), self._rows], eos_id, np.int32)
        for row, sentence in enumerate(ids):
            targets[: len(sentence), row] = sentence
        inputs = np.concatenate([np.full_like(targets[:1], eos_id), targets[:-1]])
        feed = {self._inputs_ph: inputs, self._targets_ph: targets}
        with one_line_errors(self._functions, running=True):
            log_probs = self._session.run(self._log_probs, feed).astype(np.float64)
        for row, words in enumerate(batch):
            unknown = sum(word not in self._vocabulary.ids for word in words)
            score = Score(words, log_probs[: len(words) + 1, row], unknown)
            if math.isnan(score.log_prob):  # possible if a user-defined network fails on one word
                raise UserError(
                    "the network returns NaN; train with --check_network, which also checks single"
                    " words"
                )
            yield score


def read_lines(descriptor: int) -> Iterator[list[bytes]]:
    """Read complete lines, and wait for input only if there is no complete line.

    Args:
      descriptor: File descriptor of a file, a pipe or a terminal.

    Yields:
      The available lines without their ends.
    """
    rest = b""
    while block := os.read(descriptor, _BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        yield lines
    if rest:
        yield [rest]


def _decode(line: bytes, index: int) -> str:
    try:
        return line.decode("utf-8" if index else "utf-8-sig")  # without a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: byte 0x{line[error.start]:02x}") from error
