"""The reason why TensorFlow sees no GPU. TensorFlow logs the reason only at a disabled level."""

import os

import tensorflow.compat.v1 as tf

_SETUP = "run USE_GPU=1 run_scripts/setup.sh"
_NO_GPU = ("", "-1", "NoDevFiles")  # values in CUDA_VISIBLE_DEVICES; Slurm writes NoDevFiles


def why_no_gpu() -> str:
    """Return why TensorFlow cannot use the GPUs, and the fix, or "" without a problem."""
    if tf.config.list_physical_devices("GPU"):
        return ""
    is_for_gpus, has_driver = tf.test.is_built_with_cuda(), _loads("libcuda.so.1")
    if not is_for_gpus and has_driver:
        return f"there is an NVIDIA driver, but TensorFlow was built for CPUs: {_SETUP}"
    if not is_for_gpus:
        return ""
    if not has_driver:
        return (
            "libcuda.so.1 does not load: install the NVIDIA driver, start the container with its"
            f" GPUs (docker run --gpus all), or {_SETUP.replace('=1', '=0')}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA ignores everything from the first invalid entry on.
    if visible is not None and visible.partition(",")[0] in _NO_GPU:
        return f"CUDA_VISIBLE_DEVICES={visible} hides the GPUs: unset it to train on them"
    return f"change CUDA_VISIBLE_DEVICES ({visible}), or read TensorFlow's log (docs/gpu.md)"


def _loads(library: str) -> bool:
    """Return whether TensorFlow can load a library, also from its own directories."""
    try:
        tf.load_op_library(library)
    except tf.errors.OpError:
        return False
    return True
