"""Checkpoints of TF 1.x programs, in the format of `tf.train.Saver`.

A checkpoint is named by its prefix, such as `save/model.ckpt-4100`. Its files are `PREFIX.index`
and `PREFIX.data-*`.
"""

import glob
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from lm.checkpoint.tensors import model_path, read_errors
from lm.errors import UserError
from lm.files import sha256_of
from lm.functions import NetworkFunctions
from lm.tensorflow_import import cpu_session

_FILE = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")


def find(path: str) -> str | None:
    """Return the absolute prefix of a checkpoint, or None if the path does not name a checkpoint.

    The path is a prefix, one of the files of a checkpoint, or a directory with a file named
    `checkpoint`, which names the newest checkpoint.
    """
    if not os.path.isdir(path):
        prefix = _FILE.sub("", os.path.abspath(path))
        return prefix if os.path.isfile(f"{prefix}.index") else None
    with read_errors(os.path.join(path, "checkpoint")):
        state = tf.train.get_checkpoint_state(path)
    if state is None:
        return None
    # The directory may have been moved or copied since the program wrote the file.
    here = os.path.abspath(os.path.join(path, os.path.basename(state.model_checkpoint_path)))
    for prefix in (here, os.path.abspath(state.model_checkpoint_path)):
        if os.path.isfile(f"{prefix}.index"):
            return prefix
    raise UserError(
        f"{os.path.join(path, 'checkpoint')} names {state.model_checkpoint_path}, but"
        f" {here}.index is missing: copy this file too, or pass the prefix of a checkpoint"
    )


def checksums(prefix: str) -> dict[str, str]:
    """Return the SHA-256 of each file with values or names, by file name."""
    paths = glob.glob(f"{glob.escape(prefix)}.index") + glob.glob(f"{glob.escape(prefix)}.data-*")
    return {os.path.basename(path): sha256_of(path) for path in sorted(paths)}


def program_names(
    weights: Iterable[str], functions: NetworkFunctions, rename: str
) -> dict[str, str]:
    """Return the names of weights in checkpoints of the program, by their names in the network.

    Args:
      functions: May define `checkpoint_name`.
      rename: Rules `regex=replacement` of --init_rename, separated by spaces.
    """
    # Names of variables do not contain "=", so the last "=" ends the regular expression.
    rules = [rule.rpartition("=") for rule in rename.split()]
    names = {}
    for weight in weights:
        name = functions.checkpoint_name(weight)
        for pattern, equals, replacement in rules:
            try:
                if not equals:
                    raise re.error("it has no =")
                name = re.sub(pattern, replacement, name)
            except re.error as error:
                raise UserError(
                    f"--init_rename {pattern}{equals}{replacement}: {error}; write"
                    " 'regex=replacement'"
                ) from error
        names[weight] = name
    return names


class Copy(NamedTuple):
    """A tensor that is copied from one checkpoint to another."""

    source: str  # a directory or a prefix; see `lm.checkpoint.tensors.model_path`
    tensor: str  # name in the source
    name: str  # name in the copy
    dtype: tf.DType  # type in the source
    to_dtype: tf.DType  # type in the copy


def write(prefix: str, copies: Sequence[Copy]) -> None:
    """Write a checkpoint of a TF 1.x program, and the file `checkpoint` beside it."""
    names, tensors = [], []
    with tf.Graph().as_default(), cpu_session() as session:
        for source, group in groupby(copies, lambda copy: copy.source):
            group = list(group)
            read = tf.raw_ops.RestoreV2(
                prefix=model_path(source),
                tensor_names=[copy.tensor for copy in group],
                shape_and_slices=[""] * len(group),
                dtypes=[copy.dtype for copy in group],
            )
            names += [copy.name for copy in group]
            tensors += [tf.cast(value, copy.to_dtype) for value, copy in zip(read, group)]
        session.run(
            tf.raw_ops.SaveV2(
                prefix=os.fsencode(prefix),
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=tensors,
            )
        )
    directory, name = os.path.split(prefix)
    state = f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n'
    pathlib.Path(directory, "checkpoint").write_text(state)
