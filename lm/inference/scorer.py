"""Log-probabilities of sentences, as they come in."""

from __future__ import annotations

import codecs
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.errors import UserError
from lm.inference.run import Run
from lm.inference.session import open_session
from lm.model import decoding
from lm.model.network import Network
from lm.model.user_errors import one_line_errors

_BLOCK_BYTES = 1 << 16


class Score(NamedTuple):
    """What a model thinks of a sentence."""

    words: Sequence[str]  # without the closing <eos>
    log_probs: np.ndarray  # float64, natural, of each word and of the closing <eos>
    unknown: int  # words that are not in the vocabulary, scored as <unk>

    @property
    def log_prob(self) -> float:
        """The sentence's natural log-probability, its closing `<eos>` included."""
        return float(self.log_probs.sum())


class Scorer:
    """A model with a session, for one batch of sentences after another.

    Every batch has the same number of rows, those without a sentence being empty: products of
    other sizes round differently, so a sentence's score would depend on its neighbours. It depends
    on its row, up to rounding: without AVX-512, TensorFlow adds up the last rows in another order.

    Args:
      run: The run to load.
      batch_size: Sentences scored at a time.

    Raises:
      UserError: `batch_size` is out of range, or the checkpoint does not fit the run's config.
    """

    def __init__(self, run: Run, batch_size: int = 16):
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, not {batch_size}")
        self._vocabulary, self._rows, self._functions = run.vocabulary, batch_size, run.functions
        self._session, self._log_probs = open_session(run, self._build)

    def _build(self, network: Network) -> tf.Tensor:
        self._inputs_ph = tf.placeholder(tf.int32, [None, self._rows])
        self._targets_ph = tf.placeholder(tf.int32, [None, self._rows])
        return decoding.target_log_probs(network, self._inputs_ph, self._targets_ph)

    def score_stream(self, descriptor: int) -> Iterator[Score]:
        """Score the lines of a file, a pipe or a terminal, each as soon as it is whole.

        Raises:
          UserError: As `score`, or a line is not UTF-8; it names the line.
        """
        number = 1
        for lines in read_lines(descriptor):
            try:
                for score in self.score(lines):
                    yield score
                    number += 1
            except UserError as error:
                raise UserError(f"line {number} of the input: {error}") from error

    def score(self, sentences: Iterable[str]) -> Iterator[Score]:
        """Score sentences, each from an empty state after an `<eos>` to its closing one.

        Raises:
          UserError: A word is unknown and the vocabulary has no `<unk>`, or the network gives it
            no number; after the scores of the sentences before it.
        """
        sentences = iter(sentences)
        while batch := [s.split() for s in itertools.islice(sentences, self._rows)]:
            yield from self._score_batch(batch)

    def _score_batch(self, batch: Sequence[Sequence[str]]) -> Iterator[Score]:
        eos_id = self._vocabulary.eos_id
        ids, failure = [], None
        try:
            for words in batch:
                ids.append(self._vocabulary.encode(words))
        except UserError as error:
            failure = error
        targets = np.full([1 + max(map(len, ids), default=0), self._rows], eos_id, np.int32)
        for row, sentence in enumerate(ids):
            targets[: len(sentence), row] = sentence
        inputs = np.concatenate([np.full_like(targets[:1], eos_id), targets[:-1]])
        feed = {self._inputs_ph: inputs, self._targets_ph: targets}
        with one_line_errors(self._functions, running=True):
            log_probs = self._session.run(self._log_probs, feed).astype(np.float64)
        for row, words in enumerate(batch[: len(ids)]):
            unknown = sum(word not in self._vocabulary.ids for word in words)
            score = Score(words, log_probs[: len(words) + 1, row], unknown)
            if math.isnan(score.log_prob):  # a network of the user's, in windows of one word
                raise UserError(
                    "the network gives log-probabilities that are nan; train with --check_network,"
                    " which looks at single words too"
                )
            yield score
        if failure:
            raise failure


def read_lines(descriptor: int) -> Iterator[list[str]]:
    """Read lines as they come: waits only while there is no whole line.

    Args:
      descriptor: Of a file, a pipe or a terminal.

    Yields:
      Lists of the lines at hand, without their ends, at most some tens of kilobytes together,
      unless a single line is longer.

    Raises:
      UserError: A line is not UTF-8; it names the line, after those before it were yielded.
    """
    rest, number = b"", 0
    while True:
        block = os.read(descriptor, _BLOCK_BYTES)
        *lines, rest = (rest + block).split(b"\n")
        if not block and rest:
            lines.append(rest)  # the last line has no end
        good = []
        for line in lines:
            number += 1
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)  # as of a corpus
            try:
                good.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield good
                raise UserError(
                    f"line {number} of the input is not UTF-8: byte 0x{line[error.start]:02x}"
                ) from error
        yield good
        if not block:
            return
