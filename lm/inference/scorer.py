"""Log-probabilities of sentences, as they come in."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint.variables import restore_weights
from lm.cli.flags import Flags
from lm.data.vocabulary import EOS
from lm.distributed.devices import choose_threads, session_config, start_tensorflow
from lm.errors import UserError
from lm.inference.run import Run, open_run
from lm.model import stepwise
from lm.model.network import build_weights

_BLOCK_BYTES = 1 << 16


def run_scoring(flags: Flags) -> None:
    """Score the lines of stdin as `lm.score` is asked to.

    Raises:
      UserError: A flag or the run cannot be used, or a line is not UTF-8.
    """
    if flags["batch_size"] < 1:
        raise UserError(f"batch_size must be at least 1, not {flags['batch_size']}")
    scorer = Scorer(open_run(flags), flags["batch_size"])
    number = 1
    for lines in read_lines(sys.stdin.fileno()):
        try:
            for score in scorer.score(lines):
                form = score.as_json if flags["json"] else score.as_tsv
                print(form(flags["per_word"]))
                number += 1
        except UserError as error:
            raise UserError(f"line {number} of the input: {error}") from error
        sys.stdout.flush()  # whoever wrote these lines may wait for the answer


class Score(NamedTuple):
    """What a model thinks of a sentence."""

    words: Sequence[str]  # without the closing <eos>
    log_probs: np.ndarray  # float64, natural, of each word and of the closing <eos>
    unknown: int  # words that are not in the vocabulary, scored as <unk>

    @property
    def log_prob(self) -> float:
        """The sentence's natural log-probability, its closing `<eos>` included."""
        return float(self.log_probs.sum())

    def as_tsv(self, per_word: bool) -> str:
        """Return log-probability, tokens, unknown words, sentence, and one a word."""
        cells = [f"{self.log_prob:.6f}", str(len(self.log_probs)), str(self.unknown)]
        cells.append(" ".join(self.words))
        if per_word:
            cells.append(" ".join(f"{value:.6f}" for value in self.log_probs))
        return "\t".join(cells)

    def as_json(self, per_word: bool) -> str:
        """Return the same as a JSON object."""
        record = {
            "log_probability": round(self.log_prob, 6),
            "tokens": len(self.log_probs),
            "unknown": self.unknown,
            "sentence": " ".join(self.words),
        }
        if per_word:
            record["words"] = [
                {"word": word, "log_probability": round(float(value), 6)}
                for word, value in zip([*self.words, EOS], self.log_probs)
            ]
        return json.dumps(record)


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


class Scorer:
    """A model with a session, for one batch of sentences after another.

    Every batch has the same number of rows, those without a sentence being empty: products of
    other sizes round differently, so a sentence's score would depend on its neighbours.

    Args:
      run: The run to load.
      batch_size: Sentences scored at a time.
    """

    def __init__(self, run: Run, batch_size: int):
        threads = choose_threads(None, None, 1)
        start_tensorflow(threads)
        self._vocabulary, self._rows = run.vocabulary, batch_size
        with tf.Graph().as_default():
            weights = build_weights(run.config, len(run.vocabulary))
            self._inputs_ph = tf.placeholder(tf.int32, [None, batch_size])
            self._targets_ph = tf.placeholder(tf.int32, [None, batch_size])
            self._log_probs = stepwise.target_log_probs(weights, self._inputs_ph, self._targets_ph)
            self._session = tf.Session(config=session_config(threads, 0, 1))
            restore_weights(self._session, run.load_weights())

    def score(self, sentences: Iterable[str]) -> Iterator[Score]:
        """Score sentences, each from an empty state after an `<eos>` to its closing one.

        Raises:
          UserError: A word is unknown and the vocabulary has no `<unk>`; after the scores of the
            sentences before it.
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
        log_probs = self._session.run(self._log_probs, feed).astype(np.float64)
        for row, words in enumerate(batch[: len(ids)]):
            unknown = sum(word not in self._vocabulary.ids for word in words)
            yield Score(words, log_probs[: len(words) + 1, row], unknown)
        if failure:
            raise failure
