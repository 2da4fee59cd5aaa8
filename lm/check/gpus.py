"""The reason why TensorFlow sees no GPU. TensorFlow logs the reason only at a disabled level."""

from __future__ import annotations

import os
import re
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


def why_no_gpu() -> str:
    """Return why TensorFlow cannot use the GPUs of this host, and how to fix it.

    Returns:
      "" if TensorFlow sees GPUs, or if both TensorFlow and the host are set up for CPUs.
    """
    if tf.config.list_physical_devices("GPU"):
        return ""
    is_for_gpus = tf.test.is_built_with_cuda()
    driver = _DRIVER.read_text() if _DRIVER.exists() else ""  # WSL does not have this file
    library_error = load_error("libcuda.so.1")  # the part of the driver outside the kernel
    if library_error and not driver:
        fix = f"install it, or {_SETUP.replace('=1', '=0')}"
        return f"there is no NVIDIA driver: {fix}" if is_for_gpus else ""
    if not is_for_gpus:
        return f"there is an NVIDIA driver, but TensorFlow was built for CPUs: {_SETUP}"
    if library_error:
        return f"{library_error}: start the container with its GPUs (docker run --gpus all)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named_gpus() == []:
        return f"CUDA_VISIBLE_DEVICES={visible} hides the GPUs: unset it to train on them"
    missing = next(filter(None, map(load_error, _LIBRARIES)), None)
    if missing:
        return f"{missing}: remove .venv, and {_SETUP}"
    version = re.search(r"\b(\d+)\.\d+", driver)
    if version and int(version[1]) < _OLDEST_DRIVER:
        return f"the NVIDIA driver is {version[0]}: CUDA 12 needs {_OLDEST_DRIVER} or later"
    return f"change CUDA_VISIBLE_DEVICES ({visible}), or read TensorFlow's log (docs/gpu.md)"


def load_error(library: str) -> str | None:
    """Return the message if TensorFlow cannot load a library.

    TensorFlow also searches directories that the dynamic linker does not search.
    """
    try:
        tf.load_op_library(library)
    except tf.errors.OpError as error:
        return error.message
    return None
