"""Export of a run as a checkpoint of a TF 1.x program."""

import os

import tensorflow.compat.v1 as tf

from lm import logger
from lm.checkpoint import tf1_format
from lm.checkpoint.tensors import tensor_types, weight_tensors
from lm.inference.export_path import new_export
from lm.inference.trained_run import Run
from lm.record import InitRecord

_AVERAGE = "/ExponentialMovingAverage"


def export(run: Run, to: str) -> None:
    """Write the weights of a run to a new directory, atomically, with the program's names.

    If the run was initialized from a checkpoint of the program, the export also contains the other
    variables of this checkpoint, such as optimizer slots, which the program may restore too. Moving
    averages of the weights have the values of the exported weights.
    """
    origin = run.checkpoint.manifest.record.init_from
    tensors, types = weight_tensors(run.checkpoint), tensor_types(run.checkpoint.path)
    names = tf1_format.program_names(tensors, run.functions, origin.rename if origin else "")
    there = _types_of_origin(origin)
    copies = []
    for weight, tensor in tensors.items():
        dtype = types[tensor]
        plain = names[weight].removesuffix(_AVERAGE)  # --init_rename may have selected the averages
        for name in sorted({names[weight], plain} | (there.keys() & {plain + _AVERAGE})):
            copies.append(
                tf1_format.Copy(run.checkpoint.path, tensor, name, dtype, there.get(name, dtype))
            )
    others = sorted(there.keys() - {copy.name for copy in copies})
    for name in others:
        copies.append(tf1_format.Copy(origin.tf1_checkpoint, name, name, there[name], there[name]))
    file = f"model.ckpt-{run.checkpoint.manifest.step}"
    with new_export(to) as directory:
        os.mkdir(directory)
        tf1_format.write(os.path.join(directory, file), copies)
    rest = f" and {len(others)} other variables of {origin.tf1_checkpoint}" if others else ""
    logger.info("wrote %s with %s weights%s", os.path.join(to, file), len(tensors), rest)


def _types_of_origin(origin: InitRecord | None) -> dict[str, tf.DType]:
    """Return the types of the tensors in the checkpoint that the run was initialized from."""
    prefix = origin and origin.tf1_checkpoint
    if not prefix:
        return {}
    if tf1_format.find(prefix) is None or tf1_format.checksums(prefix) != origin.tf1_sha256:
        logger.warning(
            "%s is missing or has changed since the run started, so the export contains only the"
            " weights",
            prefix,
        )
        return {}
    return tensor_types(prefix)
