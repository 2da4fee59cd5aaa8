"""The GPUs of this host, where TensorFlow is not asked or says nothing of them."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from typing import Optional

_NONE = {"", "-1", "NoDevFiles"}  # in CUDA_VISIBLE_DEVICES; the last is Slurm's


def named_gpus() -> Optional[list[str]]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, or None if it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    # CUDA sees those before the first that there cannot be.
    return list(itertools.takewhile(lambda name: name not in _NONE, visible.split(",")))


def count_gpus() -> int:
    """Return how many GPUs this host has, by its driver."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    # "GPU 0: NVIDIA RTX 4060 Laptop GPU (UUID: ...)", and indented the parts of a divided one.
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
