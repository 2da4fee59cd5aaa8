"""Find the checkpoint of --init_from, and load it if a TF 1.x program wrote it."""

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from lm import logger
from lm.checkpoint import store, tf1_format
from lm.checkpoint.manifest import MANIFEST, Checkpoint
from lm.checkpoint.tensors import tensor_shapes, tensor_types
from lm.checkpoint.transfer import weight_variables
from lm.config import RunOptions
from lm.errors import UserError, first_names
from lm.functions import NetworkFunctions
from lm.record import InitRecord, load_record, run_with
from lm.tokens.tokenizers import Tokenizer
from lm.training.initialize_run import values_of_run
from lm.training.restore import InitialValues, Table


class Source(NamedTuple):
    """The checkpoint of --init_from."""

    record: InitRecord
    checkpoint: Checkpoint | None  # None for a checkpoint of a TF 1.x program


def find_source(options: RunOptions) -> Source:
    """Return the checkpoint of --init_from, after a check of its files."""
    path = options.init_from
    is_run = load_record(path) is not None
    if is_run or os.path.exists(os.path.join(path, MANIFEST)):
        if options.init_rename:
            raise UserError(
                f"--init_rename is for TF 1.x checkpoints, but {path} is a run: remove it"
            )
        if is_run:
            return _of_run(store.find(path, options.checkpoint))
        if options.checkpoint != RunOptions().checkpoint:
            raise UserError(f"--checkpoint is for runs, but {path} is a checkpoint: remove it")
        run_with(path)  # Its tokenizer is needed.
        return _of_run(store.verify(path))
    prefix = tf1_format.find(path)
    if prefix is None:
        raise UserError(
            f"--init_from {path} is neither a run, a checkpoint of a run nor a TF 1.x checkpoint:"
            " pass a prefix such as model.ckpt-4100, or a directory with the file checkpoint"
        )
    if os.path.exists(os.path.join(os.path.dirname(prefix), MANIFEST)):
        raise UserError(
            f"--init_from {path} is a file of a checkpoint of a run: pass {os.path.dirname(prefix)}"
        )
    for name in ("new_vocabulary", "checkpoint"):
        if getattr(options, name) != getattr(RunOptions(), name):
            raise UserError(f"--{name} is for runs, but {path} is a TF 1.x checkpoint: remove it")
    sha256 = tf1_format.checksums(prefix)
    return Source(InitRecord(prefix, sha256, prefix, sha256, options.init_rename), None)


def _of_run(checkpoint: Checkpoint) -> Source:
    manifest = checkpoint.manifest
    sha256 = {name: facts["sha256"] for name, facts in manifest.files.items()}
    before = manifest.record.init_from or InitRecord("", {})
    path = os.path.abspath(checkpoint.path)
    return Source(dataclasses.replace(before, path=path, sha256=sha256), checkpoint)


def initial_values(
    source: Source, options: RunOptions, tokenizer: Tokenizer, functions: NetworkFunctions
) -> InitialValues:
    """Return the values of --init_from for the current graph."""
    weights = weight_variables(tf.get_default_graph())
    shapes = {name: v.shape.as_list() for name, v in weights.items()}
    if source.checkpoint:
        return values_of_run(source.checkpoint, options, tokenizer, shapes)
    prefix = source.record.path
    names = tf1_format.program_names(shapes, functions, options.init_rename)
    values = _values_of_program(prefix, names, shapes, len(tokenizer), options.init_partly)
    found = tensor_types(prefix)
    converted = {
        weight: found[tensor]
        for weight, tensor in values.tensors.items()
        if found[tensor] != weights[weight].dtype.base_dtype
    }
    return values._replace(types=converted)


def _values_of_program(
    prefix: str,
    names: Mapping[str, str],
    shapes: Mapping[str, list[int]],
    vocab_size: int,
    is_part: bool,
) -> InitialValues:
    """Return the weights of a checkpoint of a TF 1.x program.

    Args:
      names: The name of the tensor of each weight.
      shapes: The shape of each weight.
      is_part: Whether to load only the weights and rows that fit.
    """
    found = tensor_shapes(prefix)
    tensors = {w: names[w] for w, shape in shapes.items() if found.get(names[w]) == shape}
    tables = {
        weight: table
        for weight, shape in shapes.items()
        if (table := _common_rows(names[weight], found, shape, vocab_size))
    }
    rest = [weight for weight in shapes if weight not in tensors]
    if rest and not is_part:
        raise _misfit(prefix, rest[0], names, found, shapes, tables)
    if not tensors and not tables:
        raise UserError(f"--init_from {prefix}: the checkpoint has no weights that fit this model")
    unused = sorted(found.keys() - set(names.values()))
    parts = [f"loaded {len(tensors)} weights of {prefix}"]
    parts += [f"loaded {len(t.ids):,} rows of {weight}" for weight, t in tables.items()]
    if initialized := [weight for weight in rest if weight not in tables]:
        parts.append(f"initialized {first_names(initialized)}")
    if unused:
        parts.append(f"the network does not use {first_names(unused)}")
    logger.info("--init_from: %s", "; ".join(parts))
    return InitialValues(prefix, tensors, {}, tables)


def _common_rows(
    tensor: str, found: Mapping[str, list[int]], shape: list[int], vocab_size: int
) -> Table | None:
    """Return the common rows of a tensor and a weight that only differ in their number of rows.

    The rows are axis 0, or the axis of the words.
    """
    saved = found.get(tensor, [])
    differing = [axis for axis, pair in enumerate(zip(saved, shape)) if pair[0] != pair[1]]
    if len(saved) != len(shape) or len(differing) != 1:
        return None
    if len(shape) < 2 and vocab_size not in shape:  # the bias of an LSTM: four gates in one axis
        return None
    (axis,) = differing
    if shape[axis] != vocab_size and (axis > 0 or vocab_size in shape):
        return None
    rows = range(min(saved[axis], shape[axis]))
    return Table(tensor, axis, rows, rows)


def _misfit(
    prefix: str,
    weight: str,
    names: Mapping[str, str],
    found: Mapping[str, list[int]],
    shapes: Mapping[str, list[int]],
    tables: Mapping[str, Table],
) -> UserError:
    """Return the error for a weight that the checkpoint does not have in its shape."""
    name, shape = names[weight], shapes[weight]
    if weight in tables:
        axis = tables[weight].axis
        return UserError(
            f"{name} has {found[name][axis]:,} rows in {prefix}, but {shape[axis]:,} in this model:"
            " use the vocabulary of the checkpoint, or load the common rows with --init_partly"
        )
    if name in found:
        return UserError(
            f"{name} has the shape {found[name]} in {prefix}, but {shape} in this model;"
            " --init_partly initializes such weights"
        )
    slots = {other for other in found if other.rpartition("/")[0] in found}
    free = found.keys() - slots - set(names.values())
    same_shape = sorted(other for other in free if found[other] == shape)
    near = difflib.get_close_matches(name, same_shape, n=3, cutoff=0)
    hint = f"the nearest names of this shape are {', '.join(near)}" if near else ""
    return UserError(
        f"{prefix} has no {name} {shape}: {hint or 'no other tensor has this shape'}. Map the names"
        " with --init_rename or checkpoint_name in the config file, or initialize such weights with"
        " --init_partly"
    )
