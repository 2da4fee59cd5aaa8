"""The reasons why TensorFlow sees no GPU, on simulated hosts."""

import pytest

from lm.check import gpus

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:23:56 UTC 2024\n"
NEW, OLD = DRIVER.format("580.65.06"), DRIVER.format("470.223.02")


def test_library_that_tensorflow_cannot_load_is_named():
    assert gpus.load_error("libc.so.6") is None
    message = "libnowhere.so.1: cannot open shared object file"
    assert gpus.load_error("libnowhere.so.1").startswith(message)


@pytest.mark.parametrize(
    "for_gpus, driver, missing, visible, message",
    [
        (False, "", ["libcuda.so.1"], None, ""),
        (False, NEW, [], None, "but TensorFlow was built for CPUs: run USE_GPU=1"),
        (False, "", [], None, "but TensorFlow was built for CPUs"),
        (True, "", ["libcuda.so.1"], None, "there is no NVIDIA driver: install"),
        (True, NEW, ["libcuda.so.1"], None, "libcuda.so.1 is missing: start the container"),
        (True, NEW, [], "", "CUDA_VISIBLE_DEVICES= hides the GPUs"),
        (True, NEW, [], "-1,0", "CUDA_VISIBLE_DEVICES=-1,0 hides the GPUs"),
        (True, NEW, ["libcudnn.so.9"], None, "libcudnn.so.9 is missing: remove .venv, and run"),
        (True, OLD, [], "0", "the NVIDIA driver is 470.223: CUDA 12 needs 525 or later"),
        (True, "", [], "7", "change CUDA_VISIBLE_DEVICES (7)"),  # WSL has no driver file
    ],
)
def test_each_problem_has_a_fix(monkeypatch, tmp_path, for_gpus, driver, missing, visible, message):
    if driver:
        (tmp_path / "version").write_text(driver)
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(gpus.tf.test, "is_built_with_cuda", lambda: for_gpus)

    def load_error(name):
        return f"{name} is missing" if name in missing else None

    monkeypatch.setattr(gpus, "load_error", load_error)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpus.why_no_gpu()
    assert message in found and bool(message) == bool(found)
