"""Why TensorFlow takes no GPU: it says so in its log alone, at a level that is off."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import tensorflow.compat.v1 as tf

from lm.distributed.devices import named_gpus

_DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST_DRIVER = 525  # of CUDA 12: https://docs.nvidia.com/deploy/cuda-compatibility/
# What TensorFlow's wheels, 2.18 to 2.21, open before they take a GPU.
_LIBRARIES = (
    "libcudart.so.12",
    "libcublas.so.12",
    "libcublasLt.so.12",
    "libcufft.so.11",
    "libcusolver.so.11",
    "libcusparse.so.12",
    "libcudnn.so.9",
)
_SETUP = "run USE_GPU=1 run_scripts/setup.sh"
_ASK = (
    "TF_CPP_MIN_LOG_LEVEL=0 python -c"
    """ 'import tensorflow as tf; tf.config.list_physical_devices("GPU")'"""
)


def why_no_gpu() -> str:
    """Say what keeps TensorFlow from the GPUs of this host, and what to do about it.

    Returns:
      "" where it sees some, and where neither it nor the host is made for them.
    """
    driver = _DRIVER.read_text() if _DRIVER.exists() else ""
    return "" if tf.config.list_physical_devices("GPU") else _obstacle(driver)


def _obstacle(driver: str) -> str:
    """`driver` is what the kernel says of its NVIDIA driver, "" without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    library = load_errors(["libcuda.so.1"])  # the driver outside the kernel; all that WSL has
    if not tf.test.is_built_with_cuda():
        found = driver or not library
        return f"TensorFlow is for CPUs, and there is an NVIDIA driver: {_SETUP}" if found else ""
    if library and not driver:
        return (
            "TensorFlow is for GPUs, and there is no NVIDIA driver: install it, or run USE_GPU=0"
            " run_scripts/setup.sh"
        )
    if library:
        return f"{library[0]}: start the container with its GPUs (docker run --gpus all)"
    if named_gpus() == []:
        return f"CUDA_VISIBLE_DEVICES={visible} hides the GPUs: unset it to train on them"
    missing = load_errors(_LIBRARIES)
    if missing:
        return f"{missing[0]}: remove .venv, and {_SETUP}"
    version = re.search(r"\b(\d+)\.\d+", driver)
    if version and int(version[1]) < _OLDEST_DRIVER:
        return f"the NVIDIA driver is {version[0]}: CUDA 12 needs {_OLDEST_DRIVER} or later"
    return f"change CUDA_VISIBLE_DEVICES ({visible}), or see what TensorFlow says: {_ASK}"


def load_errors(libraries: Sequence[str]) -> list[str]:
    """Return what is said of those libraries that TensorFlow, which looks in places of its own,
    cannot load."""
    errors = []
    for library in libraries:
        try:
            tf.load_op_library(library)
        except tf.errors.OpError as error:
            errors.append(error.message)
    return errors
