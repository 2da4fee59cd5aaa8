"""The tensors of a checkpoint: TensorFlow's part of its files."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint.manifest import Checkpoint
from lm.errors import RunError, first_line
from lm.tensorflow_import import cpu_session


class Part(NamedTuple):
    """Consecutive rows of a tensor in a checkpoint, or the whole tensor."""

    name: str
    array: np.ndarray
    slice_spec: str = ""  # the rows in the notation of TensorFlow, or "" for the whole tensor


Group = Sequence[Part]  # is in memory at one time, and is written to one data file


def whole(arrays: Mapping[str, np.ndarray]) -> Group:
    """Return a group with each array as one part."""
    return [Part(name, array) for name, array in arrays.items()]


def average_name(weight: str) -> str:
    """Return the name of the variable that holds the average of a weight."""
    return f"{weight}/average"


@contextlib.contextmanager
def read_errors(checkpoint: str) -> Iterator[None]:
    """Raise RunError if TensorFlow cannot read a checkpoint."""
    try:
        yield
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise RunError(
            f"{checkpoint} cannot be read: {first_line(error)}; copy its files again if they are"
            " incomplete or corrupt"
        ) from error


def model_path(checkpoint: str) -> bytes:
    """Return the path that TensorFlow uses. It is bytes, because it may not be valid UTF-8.

    `checkpoint` is a directory, or the prefix of a checkpoint of a TF 1.x program.
    """
    is_directory = os.path.isdir(checkpoint)
    return os.fsencode(os.path.join(checkpoint, "model") if is_directory else checkpoint)


def tensor_shapes(checkpoint: str) -> dict[str, list[int]]:
    """Return the shapes of the variables, and of the recurrent state of all rows, by name."""
    with read_errors(checkpoint):
        return tf.train.NewCheckpointReader(model_path(checkpoint)).get_variable_to_shape_map()


def tensor_types(checkpoint: str) -> dict[str, tf.DType]:
    """Return the types of the tensors of a checkpoint by name."""
    with read_errors(checkpoint):
        return tf.train.NewCheckpointReader(model_path(checkpoint)).get_variable_to_dtype_map()


def load_arrays(checkpoint: str, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read tensors of a checkpoint by name."""
    with read_errors(checkpoint):
        reader = tf.train.NewCheckpointReader(model_path(checkpoint))
        return {name: reader.get_tensor(name) for name in names}


def write_tensors(directory: str, groups: Iterable[Group]) -> None:
    """Write groups of parts. The parts of a tensor must be consecutive."""
    prefixes: list[bytes] = []
    with tf.Graph().as_default(), cpu_session() as session:
        for group in groups:
            prefixes.append(os.fsencode(os.path.join(directory, f"group-{len(prefixes)}")))
            placeholders = [tf.placeholder(part.array.dtype, part.array.shape) for part in group]
            save_op = tf.raw_ops.SaveV2(
                prefix=prefixes[-1],
                tensor_names=[part.name for part in group],
                shape_and_slices=[part.slice_spec for part in group],
                tensors=placeholders,
            )
            session.run(save_op, {ph: part.array for ph, part in zip(placeholders, group)})
        # Renames the data files, and joins the lists of their contents.
        session.run(
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=prefixes,
                destination_prefix=model_path(directory),
                delete_old_dirs=False,
            )
        )


def weight_tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the name of the tensor of each weight: its average if the checkpoint has one."""
    names = {name: name for name in checkpoint.manifest.weights}
    if checkpoint.manifest.progress.num_averaged:  # Weights that are not trained have no average.
        shapes = tensor_shapes(checkpoint.path)
        names.update((name, average_name(name)) for name in names if average_name(name) in shapes)
    return names
