"""Text generation, one token at a time."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow.compat.v1 as tf

from lm import logger
from lm.data.tokenizers import Tokenizer
from lm.data.vocabulary import UNK
from lm.inference.sampling import Sampling, draw, next_word_distribution
from lm.inference.trained_run import Run, check_words, open_session
from lm.model import decoding
from lm.model.network import Network


class Generator:
    """Generates text with the network of a run."""

    def __init__(self, run: Run):
        check_words(run)
        self._tokenizer, self._functions = run.tokenizer, run.functions
        self._session, self._step = open_session(run, self._build)

    def _build(self, network: Network) -> tuple:
        self._state_shape = [1, decoding.state_size(network)]
        self._words_ph = tf.placeholder(tf.int32, [1])
        self._state_ph = tf.placeholder(tf.float32, self._state_shape)
        return decoding.next_word(network, self._words_ph, self._state_ph)

    def texts(self, sampling: Sampling) -> Iterator[Iterator[str]]:
        """Generate samples of text. A sample depends only on the seed and on its index.

        Yield for each sample an iterator over the pieces of its text, which starts with the prompt
        as the model reads it. A piece appears as soon as its characters are complete.
        """
        prompt = encode_prompt(sampling.prompt, self._tokenizer)
        for sample in range(sampling.num_samples):
            drawn = itertools.islice(self._draw(prompt, sampling, sample), sampling.num_words)
            yield self._tokenizer.decode_stream(itertools.chain(prompt, drawn))

    def close(self) -> None:
        self._session.close()

    def _draw(self, prompt: Sequence[int], sampling: Sampling, sample: int) -> Iterator[int]:
        eos_id, unk_id = self._tokenizer.eos_id, self._tokenizer.unk_id
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


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token IDs of a prompt, and log its unknown words."""
    unknown = dict.fromkeys(tokenizer.unknown(prompt))
    ids = tokenizer.encode(prompt)
    if unknown:
        logger.warning("not in the vocabulary, read as %s: %s", UNK, ", ".join(unknown))
    return ids
