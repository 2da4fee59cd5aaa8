"""Export of the weights of a run for other frameworks."""

import json
import os

import numpy as np

from lm import logger
from lm.checkpoint.tensors import load_arrays, weight_tensors
from lm.errors import needs_extra
from lm.inference.export_path import new_export
from lm.inference.trained_run import Run


def export_weights(run: Run, to: str, file_format: str) -> None:
    """Write the weights of a run to a new file, atomically: an average if the run has averages.

    Args:
      file_format: "npz" or "safetensors". The metadata of a safetensors file contain the config.
    """
    tensors = weight_tensors(run.checkpoint)
    arrays = load_arrays(run.checkpoint.path, tensors.values())
    weights = {name: np.asarray(arrays[tensor], order="C") for name, tensor in tensors.items()}
    with new_export(to) as path, open(path, "wb") as file:
        if file_format == "npz":
            np.savez(file, **weights)
        else:
            with needs_extra("safetensors"):
                from safetensors.numpy import save
            metadata = {"config": json.dumps(run.checkpoint.manifest.record.config)}
            file.write(save(weights, metadata))
    logger.info("wrote %s: %d tensors, %s bytes", to, len(weights), f"{os.path.getsize(to):,}")
