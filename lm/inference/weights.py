"""Export of the weights of a run for other frameworks."""

import io
import json
import os

import numpy as np

from lm import logger
from lm.checkpoint.tensors import load_arrays, weight_tensors
from lm.errors import UserError, error_class, needs_extra
from lm.files import write_atomically
from lm.inference.trained_run import Run


def export_weights(run: Run, to: str, file_format: str) -> None:
    """Write the weights of a run to a new file, atomically: an average if the run has averages.

    Args:
      file_format: "npz" or "safetensors". The metadata of a safetensors file contain the config.
    """
    if os.path.exists(to):
        raise UserError(f"--to {to} already exists: choose a different file, or remove it")
    tensors = weight_tensors(run.checkpoint)
    arrays = load_arrays(run.checkpoint.path, tensors.values())
    weights = {name: np.asarray(arrays[tensor], order="C") for name, tensor in tensors.items()}
    if file_format == "npz":
        file = io.BytesIO()
        np.savez(file, **weights)
        content = file.getvalue()
    else:
        with needs_extra("safetensors"):
            from safetensors.numpy import save
        metadata = {"config": json.dumps(run.checkpoint.manifest.record.config)}
        content = save(weights, metadata)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(to)), exist_ok=True)
        write_atomically(to, content)
    except OSError as error:
        raise error_class(error)(f"cannot write {to}: {error.strerror}") from error
    logger.info("wrote %s: %d tensors, %s bytes", to, len(weights), f"{len(content):,}")
