"""Text from a model, a word at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from lm.data.vocabulary import EOS, UNK, Vocabulary
from lm.inference.run import Run
from lm.inference.sampling import Sampling, draw, next_word_distribution
from lm.inference.session import open_session
from lm.model import decoding
from lm.model.network import Network
from lm.model.user_errors import one_line_errors

logger = logging.getLogger("lm")


class Generator:
    """A model with a session, for texts one after another.

    Args:
      run: The run to load.
    """

    def __init__(self, run: Run):
        self._vocabulary, self._functions = run.vocabulary, run.functions
        self._session, self._step = open_session(run, self._build)

    def _build(self, network: Network) -> tuple:
        self._state_shape = [1, decoding.state_size(network)]
        self._words_ph = tf.placeholder(tf.int32, [1])
        self._state_ph = tf.placeholder(tf.float32, self._state_shape)
        return decoding.next_word(network, self._words_ph, self._state_ph)

    def texts(self, sampling: Sampling) -> Iterator[Iterator[str]]:
        """Draw texts, a row at a time: none depends on the others.

        Args:
          sampling: How they are drawn; its seed and the place of a text decide it.

        Yields:
          The words of each text, as they are drawn: the prompt's, as the model reads them, then
          `num_words` more.

        Raises:
          UserError: A word of the prompt is unknown and the vocabulary has no `<unk>`.
        """
        prompt = encode_prompt(sampling.prompt, self._vocabulary)
        for sample in range(sampling.num_samples):
            drawn = itertools.islice(self._draw(prompt, sampling, sample), sampling.num_words)
            yield map(self._vocabulary.words.__getitem__, itertools.chain(prompt, drawn))

    def _draw(self, prompt: Sequence[int], sampling: Sampling, sample: int) -> Iterator[int]:
        unk = self._vocabulary.unk_id
        banned = [] if sampling.allow_unk or unk is None else [unk]
        random = np.random.Generator(np.random.PCG64([sampling.seed, sample])).random
        unread, state = [self._vocabulary.eos_id, *prompt], np.zeros(self._state_shape)
        while True:
            for word in unread:
                feed = {self._words_ph: [word], self._state_ph: state}
                with one_line_errors(self._functions, running=True):
                    log_probs, state = self._session.run(self._step, feed)
            word = draw(next_word_distribution(log_probs[0], sampling, banned), random())
            yield word
            unread = [word]


def encode_prompt(prompt: str, vocabulary: Vocabulary) -> list[int]:
    """Turn a prompt into ids; line ends become `<eos>`, and unknown words are reported.

    Raises:
      UserError: A word is unknown and the vocabulary has no `<unk>`.
    """
    words = prompt.replace("\n", f" {EOS} ").split()
    unknown = [word for word in dict.fromkeys(words) if word not in vocabulary.ids]
    ids = vocabulary.encode(words)
    if unknown:
        logger.warning("not in the vocabulary, read as %s: %s", UNK, ", ".join(unknown))
    return ids


def spaced(words: Iterable[str]) -> Iterator[str]:
    """Yield the pieces of a text: words with spaces between them, and line ends for `<eos>`."""
    space = ""
    for word in words:
        yield "\n" if word == EOS else space + word
        space = "" if word == EOS else " "
