"""The reasons why TensorFlow sees no GPU, on simulated hosts."""

import pytest

from lm.check import gpus


@pytest.mark.parametrize(
    "for_gpus, has_driver, visible, message",
    [
        (False, False, None, ""),
        (False, True, None, "but TensorFlow was built for CPUs: run USE_GPU=1"),
        (True, False, None, "libcuda.so.1 does not load: install the NVIDIA driver"),
        (True, True, "", "CUDA_VISIBLE_DEVICES= hides the GPUs"),
        (True, True, "-1,0", "CUDA_VISIBLE_DEVICES=-1,0 hides the GPUs"),
        (True, True, "7", "change CUDA_VISIBLE_DEVICES (7)"),
    ],
)
def test_each_problem_has_a_fix(monkeypatch, for_gpus, has_driver, visible, message):
    monkeypatch.setattr(gpus.tf.test, "is_built_with_cuda", lambda: for_gpus)
    # Load a library that every host has, or a library that no host has.
    load, library = gpus.tf.load_op_library, "libc.so.6" if has_driver else "libnowhere.so.1"
    monkeypatch.setattr(gpus.tf, "load_op_library", lambda name: load(library))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpus.why_no_gpu()
    assert message in found and bool(message) == bool(found)
