"""The workload of all implementations: the words, the initial weights and the training step."""

import dataclasses
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from lm.config import Config
from lm.data.corpus import load_corpus
from lm.errors import UserError

LSTM_WEIGHTS = ("input_weights", "recurrent_weights", "bias")
_PTB_VOCAB_SIZE = 10_000
_WINDOWS = 64  # length of the random corpus
# A weight that only this network has. The gates of an LSTM layer are ordered i, j, f, o. The other
# networks are defined in configs/config_gru.py and configs/config_transformer.py.
_WEIGHT_OF = {
    "lstm": "lstm_0/input_weights",
    "gru": "gates/weights",
    "transformer": "layer_0/q/weights",
}


class StepResult(NamedTuple):
    """Results of one training step."""

    loss: float  # summed over time, averaged over rows
    grad_norm: float  # before clipping
    exchange_seconds: float = 0.0


# A training step on inputs [T, B] and targets [T, B], both int32.
Step = Callable[[np.ndarray, np.ndarray], StepResult]


def load_words(config: Config, data_path: str | None) -> tuple[np.ndarray, int]:
    """Return int32 training IDs and the vocabulary size, of a corpus or of random words.

    Random words follow Zipf's law, p ~ 1 / rank, as in a natural language. Repeated words within a
    batch determine how sparse the gradient of the embedding is.
    """
    if data_path:
        corpus = load_corpus(data_path, dataclasses.replace(config, corpus="files"))
        return corpus.train, len(corpus.tokenizer)
    vocab_size = config.vocab_size or _PTB_VOCAB_SIZE
    if config.cutoffs and config.cutoffs[-1] >= vocab_size:
        raise UserError(
            f"adaptive_softmax_cutoffs {config.adaptive_softmax_cutoffs} need a larger vocabulary:"
            " add --vocab_size or --data_path"
        )
    count = config.batch_size * (_WINDOWS * config.num_steps + 1)
    # Inverse of the continuous distribution function: ln(x) is uniform.
    uniform = np.random.default_rng(config.seed).random(count)
    ids = np.exp(uniform * np.log(vocab_size + 1)).astype(np.int32) - 1
    return np.minimum(ids, vocab_size - 1), vocab_size


def initial_weight(config: Config, name: str, shape: Sequence[int]) -> np.ndarray:
    """Return the initial value of a weight or bias, uniform in ±`init_scale`.

    For the embedding, `embedding_init_scale` has priority. NumPy draws the value, so that different
    frameworks start with equal weights.
    """
    rng = np.random.default_rng([config.seed, zlib.crc32(name.encode())])
    values = rng.random(shape, dtype=np.float32)
    # In place, because an expression would create more arrays of this size.
    values *= 2
    values -= 1
    own_scale = config.embedding_init_scale if name == "embedding" else None
    values *= own_scale or config.init_scale
    return values


def network_of(names: Collection[str]) -> str:
    """Return the network that has the weights with these names, or "" if no peer implements it."""
    found = [network for network, weight in _WEIGHT_OF.items() if weight in names]
    return found[0] if found else ""
