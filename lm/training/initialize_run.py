"""Initialize the weights of a run with the weights of an earlier run."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from lm import logger
from lm.checkpoint.manifest import Checkpoint
from lm.checkpoint.tensors import tensor_shapes, weight_tensors
from lm.checkpoint.transfer import fitting_tensors
from lm.config import Config, RunOptions
from lm.errors import UserError
from lm.options import defaults
from lm.record import run_of_checkpoint
from lm.tokens.selection import saved_tokenizer
from lm.tokens.tokenizers import Tokenizer
from lm.training.restore import InitialValues, Table

# _WORD_AXES contains the axis of the words in each table of this program. _LAYER matches the layers
# of the built-in network. A layer may have as many units as the vocabulary has words, so its size
# does not show whether its rows are words.
_WORD_AXES = {"embedding": 0, "softmax/weights": 1, "softmax/bias": 0}
_LAYER = re.compile(r"lstm_\d+/.+|softmax/projection")
# Weights of an adaptive softmax or of an adaptive input in which each row belongs to a word.
_OF_WORDS = re.compile(r"(.+/)?embedding/band_\d+|softmax/(weights|bias|cluster_\d+/words)")
# The settings of the built-in network that determine its outputs.
_NETWORK = {
    "num_layers", "hidden_size", "embedding_size", "tie_weights", "forget_bias", "reset_state",
    "adaptive_softmax_cutoffs", "adaptive_softmax_factor", "adaptive_input",
}  # fmt: skip
_PARTLY = "; --init_partly loads only the weights that fit"


def values_of_run(
    checkpoint: Checkpoint, options: RunOptions, tokenizer: Tokenizer, shapes: Mapping[str, list]
) -> InitialValues:
    """Return the weights of an earlier run for a network whose weights have these shapes."""
    path = options.init_from
    same_words = checkpoint.manifest.record.vocabulary == tokenizer.sha256
    if same_words and not options.init_partly:
        tensors = fitting_tensors(checkpoint, shapes, fix=_PARTLY)
        return InitialValues(checkpoint.path, tensors, {})
    tables, of_words = {}, set()
    if not same_words:
        if not options.new_vocabulary:
            raise UserError(
                f"--init_from {path} was trained with a different tokenizer than this run uses:"
                f" restore the tokenizer files of {path}, or choose a new --output_dir"
            )
        saved = saved_tokenizer(run_of_checkpoint(path))
        if tokenizer.name == "words" != saved.name:  # probably the default of this run
            how = "choose a tokenizer of this kind with --tokenizer (its name, or its file)"
            raise UserError(
                f"--new_vocabulary builds a vocabulary of words, but {path} was trained with the"
                f" tokenizer {saved.name}: remove --new_vocabulary, or"
                f" {'use a corpus of token IDs' if saved.name == 'ids' else how}"
            )
        tables = _tables(checkpoint, saved, tokenizer, shapes)
        of_words = set(filter(_OF_WORDS.fullmatch, shapes))
    rest = {n: s for n, s in shapes.items() if n not in tables and n not in of_words}
    tensors = _fitting_weights(checkpoint, rest)
    initialized = [n for n in shapes if n not in tensors and n not in tables]
    loaded, others = ", ".join(tensors), ", ".join(initialized) or "none"
    logger.info("--init_from: loaded %s; initialized %s", loaded, others)
    missing = [n for n in rest if n not in tensors]
    if missing and not options.init_partly:
        raise UserError(f"{checkpoint.path} has no {missing[0]} of this shape{_PARTLY}")
    return InitialValues(checkpoint.path, tensors, {}, tables)


def warn_of_other_network(before: Mapping[str, Any], config: Config) -> None:
    """Warn if the network has other settings than the network that was trained.

    The shapes of the weights do not show all of these settings.
    """
    own = dataclasses.asdict(config)
    names = [n for n in own if n in before and (n in _NETWORK or n not in defaults(Config))]
    if changes := [f"{n} {before[n]!r}, now {own[n]!r}" for n in names if before[n] != own[n]]:
        logger.warning("--init_from: the earlier run had %s", "; ".join(changes))


def _tables(
    checkpoint: Checkpoint, saved: Tokenizer, tokenizer: Tokenizer, shapes: Mapping[str, list]
) -> dict[str, Table]:
    """Return the tensors with one row or column per word, by the name of the weight.

    These are the weights whose size changes with the size of the vocabulary. If both vocabularies
    have the same size, the axis of the words is known only for the weights of the built-in network.
    """
    sizes = len(saved), len(tokenizer)
    saved_ids = {token: i for i, token in enumerate(saved.tokens)}
    ids = [i for i, token in enumerate(tokenizer.tokens) if token in saved_ids]
    kept = [saved_ids[tokenizer.tokens[i]] for i in ids]
    found, tables = tensor_shapes(checkpoint.path), {}
    for name, tensor in weight_tensors(checkpoint).items():
        before, after = found[tensor], shapes.get(name, [])
        axes = [
            axis
            for axis, pair in enumerate(zip(before, after))
            if pair == sizes and [*before[:axis], sizes[1], *before[axis + 1 :]] == after
        ]
        if not axes or _LAYER.fullmatch(name):
            continue
        axis = axes[0] if sizes[0] != sizes[1] else _WORD_AXES.get(name)
        if name in _WORD_AXES and axis not in axes:
            continue  # an adaptive softmax, whose columns are not all words
        if axis is None:
            raise UserError(
                f"--new_vocabulary: both vocabularies have {len(saved):,} words, and {name} has"
                f" this size too, so it is not known whether its rows are words: use a different"
                " --vocab_size"
            )
        tables[name] = Table(tensor, axis, kept, ids)
    logger.info(
        f"--init_from: {len(ids):,} of {len(tokenizer):,} words keep their weights in"
        f" {', '.join(tables) or 'no table'}"
    )
    return tables


def _fitting_weights(checkpoint: Checkpoint, shapes: Mapping[str, list]) -> dict[str, str]:
    """Return the tensor of each weight that the checkpoint contains in its shape."""
    tensors, found = weight_tensors(checkpoint), tensor_shapes(checkpoint.path)
    fitting = {n: tensor for n, tensor in tensors.items() if found[n] == shapes.get(n)}
    if not fitting:
        raise UserError(
            f"--init_from {checkpoint.path}: the checkpoint has no weights that fit this model"
        )
    return fitting
