"""The reason why TensorFlow sees no GPU, which it logs only at a level that is off."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import tensorflow.compat.v1 as tf

from lm.distributed.devices import named_gpus

_DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST_DRIVER = 525  # for CUDA 12: https://docs.nvidia.com/deploy/cuda-compatibility/
_LIBRARIES = (  # TensorFlow 2.18 to 2.21 loads these before it uses a GPU
    "libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12", "libcufft.so.11",
    "libcusolver.so.11", "libcusparse.so.12", "libcudnn.so.9",
)  # fmt: skip
_SETUP = "run USE_GPU=1 run_scripts/setup.sh"
_ASK = (
    "TF_CPP_MIN_LOG_LEVEL=0 python -c"
    """ 'import tensorflow as tf; tf.config.list_physical_devices("GPU")'"""
)


def why_no_gpu() -> str:
    """Return why TensorFlow cannot use the GPUs of this host, and how to fix it.

    Returns:
      "" if TensorFlow sees GPUs, or if neither TensorFlow nor the host is set up for GPUs.
    """
    if tf.config.list_physical_devices("GPU"):
        return ""
    driver = _DRIVER.read_text() if _DRIVER.exists() else ""  # missing under WSL
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    library_error = load_errors(["libcuda.so.1"])  # the part of the driver outside the kernel
    if not tf.test.is_built_with_cuda():
        if driver or not library_error:
            return f"there is an NVIDIA driver, but TensorFlow was built for CPUs: {_SETUP}"
        return ""
    if library_error and not driver:
        return (
            "TensorFlow was built for GPUs, but there is no NVIDIA driver: install it, or run"
            " USE_GPU=0 run_scripts/setup.sh"
        )
    if library_error:
        return f"{library_error[0]}: start the container with its GPUs (docker run --gpus all)"
    if named_gpus() == []:
        return f"CUDA_VISIBLE_DEVICES={visible} hides the GPUs: unset it to train on them"
    missing = load_errors(_LIBRARIES)
    if missing:
        return f"{missing[0]}: remove .venv, and {_SETUP}"
    version = re.search(r"\b(\d+)\.\d+", driver)
    if version and int(version[1]) < _OLDEST_DRIVER:
        return f"the NVIDIA driver is {version[0]}: CUDA 12 needs {_OLDEST_DRIVER} or later"
    return f"change CUDA_VISIBLE_DEVICES ({visible}), or read TensorFlow's log: {_ASK}"


def load_errors(libraries: Sequence[str]) -> list[str]:
    """Return the messages for the libraries that TensorFlow cannot load.

    TensorFlow also searches directories that other programs do not.
    """
    errors = []
    for library in libraries:
        try:
            tf.load_op_library(library)
        except tf.errors.OpError as error:
            errors.append(error.message)
    return errors
