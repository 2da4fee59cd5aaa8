"""Log-probabilities of sentences, computed as soon as the sentences arrive."""

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.data.text import check_nul
from lm.data.vocabulary import EOS
from lm.errors import UserError
from lm.inference.trained_run import Run, check_words, open_session
from lm.model import decoding
from lm.model.network import Network

_BLOCK_BYTES, _MAX_LINE_BYTES = 1 << 16, 1 << 24


class Score(NamedTuple):
    """The score of a sentence."""

    text: str  # the sentence
    log_probs: np.ndarray  # float64, natural, of each token and of the line end
    unknown: int  # number of words that are not in the vocabulary and are scored as <unk>

    @property
    def log_prob(self) -> float:
        """The natural log-probability of the sentence, including its line end."""
        return float(self.log_probs.sum())


class Scorer:
    """Scores sentences with the network of a run.

    All batches have `batch_size` rows, and the last rows of a batch may be empty. If sizes varied,
    rounding would make a score depend on the other sentences of the batch. A score still depends
    on its row up to rounding: without AVX-512, TensorFlow sums the last rows in a different order.
    """

    def __init__(self, run: Run, batch_size: int = 16):
        check_words(run)
        self._tokenizer, self._rows, self._functions = run.tokenizer, batch_size, run.functions
        self._session, self._log_probs = open_session(run, self._build)

    def _build(self, network: Network) -> tf.Tensor:
        self._inputs_ph = tf.placeholder(tf.int32, [None, self._rows])
        self._targets_ph = tf.placeholder(tf.int32, [None, self._rows])
        return decoding.target_log_probs(network, self._inputs_ph, self._targets_ph)

    def score_stream(self, descriptor: int) -> Iterator[Score]:
        """Score the lines of a file, a pipe or a terminal, each as soon as it is complete."""
        number = 0
        for lines in read_lines(descriptor):
            try:
                for score in self.score(map(decode_line, lines, itertools.count(number))):
                    yield score
                    number += 1
            except UserError as error:
                raise UserError(f"line {number + 1} of the input: {error}") from error

    def score(self, sentences: Iterable[str]) -> Iterator[Score]:
        """Score sentences, each from an empty recurrent state to its line end."""
        batch: list[tuple[str, list[int]]] = []
        try:
            for sentence in sentences:
                batch.append((sentence, self._tokenizer.encode_line(sentence)))
                if len(batch) == self._rows:
                    full, batch = batch, []
                    yield from self._score_batch(full)
        except UserError:
            yield from self._score_batch(batch)
            raise
        yield from self._score_batch(batch)

    def close(self) -> None:
        self._session.close()

    def _score_batch(self, batch: Sequence[tuple[str, list[int]]]) -> Iterator[Score]:
        if not batch:
            return
        eos_id = self._tokenizer.eos_id
        longest = max(len(ids) for _, ids in batch)
        targets = np.full([longest, self._rows], eos_id, np.int32)
        for row, (_, ids) in enumerate(batch):
            targets[: len(ids), row] = ids
        inputs = np.concatenate([np.full_like(targets[:1], eos_id), targets[:-1]])
        feed = {self._inputs_ph: inputs, self._targets_ph: targets}
        with self._functions.one_line_errors(running=True):
            log_probs = self._session.run(self._log_probs, feed).astype(np.float64)
        for row, (sentence, ids) in enumerate(batch):
            unknown = len(self._tokenizer.unknown(sentence))
            score = Score(sentence, log_probs[: len(ids), row], unknown)
            if math.isnan(score.log_prob):  # A user-defined network may fail on one word.
                raise UserError("the network returns NaN: use a different checkpoint")
            yield score


def read_lines(descriptor: int, max_bytes: int = _MAX_LINE_BYTES) -> Iterator[list[bytes]]:
    """Yield the available complete lines without line ends, and wait if no line is complete."""
    rest, num_bytes = [], 0
    while block := os.read(descriptor, _BLOCK_BYTES):
        rest.append(block)
        if b"\n" in block:  # Do not join the blocks of a long line before it ends.
            *lines, last = b"".join(rest).split(b"\n")
            rest, num_bytes = [last], len(last)
            yield lines
            continue
        num_bytes += len(block)
        if num_bytes > max_bytes:
            raise UserError(f"a line has more than {max_bytes} bytes: divide it into sentences")
    if last := b"".join(rest):
        yield [last]


def decode_line(line: bytes, index: int) -> str:
    """Return the text of the line with this index, which starts at 0."""
    try:
        check_nul(line)
        # The first line may start with a byte order mark.
        text = line.decode("utf-8" if index else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: byte 0x{line[error.start]:02x}") from error
    text = text.rstrip("\r")
    if "\r" in text:
        raise UserError("line ends of CR only: convert the text with tr '\\r' '\\n'")
    if EOS in text.split():
        raise UserError(f"contains {EOS}, which each line end adds: remove it")
    return text
