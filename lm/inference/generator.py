"""Text generation, one word at a time."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from lm import logger
from lm.data.vocabulary import EOS, UNK, Vocabulary
from lm.inference.run import Run, check_words, open_session
from lm.inference.sampling import Sampling, draw, next_word_distribution
from lm.model import decoding
from lm.model.network import Network


class Generator:
    """Generates text with the network of a run."""

    def __init__(self, run: Run):
        check_words(run)
        self._vocabulary, self._functions = run.vocabulary, run.functions
        self._session, self._step = open_session(run, self._build)

    def _build(self, network: Network) -> tuple:
        self._state_shape = [1, decoding.state_size(network)]
        self._words_ph = tf.placeholder(tf.int32, [1])
        self._state_ph = tf.placeholder(tf.float32, self._state_shape)
        return decoding.next_word(network, self._words_ph, self._state_ph)

    def texts(self, sampling: Sampling) -> Iterator[tuple[list[str], Iterator[str]]]:
        """Generate samples of text. A sample depends only on the seed and on its index.

        Yield for each sample the words of the prompt as the model reads them, and an iterator that
        generates the words after the prompt.
        """
        prompt = encode_prompt(sampling.prompt, self._vocabulary)
        words = self._vocabulary.words
        for sample in range(sampling.num_samples):
            drawn = itertools.islice(self._draw(prompt, sampling, sample), sampling.num_words)
            yield [words[word] for word in prompt], (words[word] for word in drawn)

    def close(self) -> None:
        self._session.close()

    def _draw(self, prompt: Sequence[int], sampling: Sampling, sample: int) -> Iterator[int]:
        eos_id, unk_id = self._vocabulary.eos_id, self._vocabulary.unk_id
        banned = [] if sampling.allow_unk or unk_id is None else [unk_id]
        random = np.random.Generator(np.random.PCG64([sampling.seed, sample])).random
        unread, state = [eos_id, *prompt], np.zeros(self._state_shape)
        while True:
            for word in unread:
                feed = {self._words_ph: [word], self._state_ph: state}
                with self._functions.one_line_errors(running=True):
                    log_probs, state = self._session.run(self._step, feed)
            word = draw(next_word_distribution(log_probs[0], sampling, banned), random())
            yield word
            if word == eos_id and sampling.stop_at_eos:
                return
            unread = [word]


def encode_prompt(prompt: str, vocabulary: Vocabulary) -> list[int]:
    """Return the token IDs of a prompt, and log its unknown words. Line ends become `<eos>`."""
    words = prompt.replace("\n", f" {EOS} ").split()
    ids = vocabulary.encode(words)
    unknown = [word for word in dict.fromkeys(words) if word not in vocabulary.ids]
    if unknown:
        logger.warning("not in the vocabulary, read as %s: %s", UNK, ", ".join(unknown))
    return ids


def spaced(words: Iterable[str]) -> Iterator[str]:
    """Yield each word with the space before it, or a line end instead of `<eos>`."""
    space = ""
    for word in words:
        yield "\n" if word == EOS else space + word
        space = "" if word == EOS else " "
