"""Text from a model, a word at a time."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint.variables import restore_weights
from lm.cli.flags import Flags
from lm.data.vocabulary import EOS, UNK, Vocabulary
from lm.distributed.devices import choose_threads, session_config, start_tensorflow
from lm.errors import UserError
from lm.inference.run import Run, open_run
from lm.inference.sampling import draw, next_word_distribution
from lm.model import stepwise
from lm.model.network import build_weights

logger = logging.getLogger("lm")


def run_generation(flags: Flags) -> None:
    """Print the texts that `lm.generate` is asked for, word by word.

    Raises:
      UserError: A flag is out of range, or the run cannot be used.
    """
    run = open_run(flags)
    vocabulary, sampling = run.vocabulary, check_sampling(flags, len(run.vocabulary))
    prompt = encode_prompt(flags["prompt"], vocabulary)
    generator = Generator(run)
    for sample in range(flags["num_samples"]):
        ids = generator.generate(prompt, sampling, sample)
        words = map(vocabulary.word_of, itertools.islice(ids, flags["num_words"]))
        if flags["json"]:
            drawn = list(words)
            record = {"sample": sample + 1, "seed": sampling.seed, "prompt": flags["prompt"]}
            text = "".join(spaced([*vocabulary.decode(prompt), *drawn]))
            print(json.dumps({**record, "words": drawn, "text": text}), flush=True)
        else:
            if flags["num_samples"] > 1:
                print(f"== {sample + 1} of {flags['num_samples']}")
            for piece in spaced(itertools.chain(vocabulary.decode(prompt), words)):
                print(piece, end="", flush=True)
            print()


def spaced(words: Iterable[str]) -> Iterator[str]:
    """Yield the pieces of a text: words with spaces between them, and line ends for `<eos>`."""
    space = ""
    for word in words:
        yield "\n" if word == EOS else space + word
        space = "" if word == EOS else " "


class Sampling(NamedTuple):
    """How words are drawn; see `next_word_distribution`."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    allow_unk: bool


def check_sampling(flags: Flags, vocab_size: int) -> Sampling:
    """Check the flags of `lm.generate`.

    Raises:
      UserError: A value is out of range; names the flag.
    """
    temperature, top_k, top_p = flags["temperature"], flags["top_k"], flags["top_p"]
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature must be at least 0, not {temperature}")
    if not 0 <= top_k:
        raise UserError(f"top_k must be at least 0, not {top_k}")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, not {top_p}")
    for name in ("num_words", "num_samples"):
        if flags[name] < 1:
            raise UserError(f"{name} must be at least 1, not {flags[name]}")
    seed = flags["seed"]
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
        logger.info("seed %d", seed)  # so that a text worth keeping can be had again
    if seed < 0:
        raise UserError(f"seed must be at least 0, not {seed}")
    return Sampling(temperature, min(top_k, vocab_size), top_p, seed, flags["allow_unk"])


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


class Generator:
    """A model with a session, for texts one after another.

    Args:
      run: The run to load.
    """

    def __init__(self, run: Run):
        threads = choose_threads(None, None, 1)
        start_tensorflow(threads)
        self._vocabulary = run.vocabulary
        with tf.Graph().as_default():
            weights = build_weights(run.config, len(run.vocabulary))
            self._words_ph = tf.placeholder(tf.int32, [1])
            self._state_ph = tf.placeholder(tf.float32, [1, run.config.num_layers, 2, None])
            self._step = stepwise.next_word(weights, self._words_ph, self._state_ph)
            self._empty_state = np.zeros([1, run.config.num_layers, 2, run.config.hidden_size])
            self._session = tf.Session(config=session_config(threads, 0, 1))
            restore_weights(self._session, run.load_weights())

    def generate(self, prompt: Sequence[int], sampling: Sampling, sample: int) -> Iterator[int]:
        """Draw words without end, one row at a time: a sample does not depend on the others.

        Args:
          prompt: Ids of the words to go on from; they follow an `<eos>`.
          sampling: How words are drawn.
          sample: Index of the sample; the seed and it decide the text.

        Yields:
          Ids of the words after the prompt.
        """
        banned = [] if sampling.allow_unk else [self._vocabulary.ids.get(UNK)]
        random = np.random.Generator(np.random.PCG64([sampling.seed, sample])).random
        state = self._empty_state
        for word in [self._vocabulary.eos_id, *prompt]:
            log_probs, state = self._read(word, state)
        while True:
            distribution = next_word_distribution(
                log_probs,
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                [word for word in banned if word is not None],
            )
            word = draw(distribution, random())
            yield word
            log_probs, state = self._read(word, state)

    def _read(self, word: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        feed = {self._words_ph: [word], self._state_ph: state}
        log_probs, state = self._session.run(self._step, feed)
        return log_probs[0], state
