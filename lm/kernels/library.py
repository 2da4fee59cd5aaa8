"""The compiled library in this process: whether it can be used, and its properties."""

import contextlib
import ctypes
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from lm import logger
from lm.errors import UserError

# `load` keeps its result, because the graphs of a run must agree.
_BUILD = "run `python -m lm.kernels.build` with g++ 9 or later (CXX=...) and start again"


class Library(NamedTuple):
    """The compiled ops, or the reason why this process does not use them."""

    ops: Any = None  # a module with one function per op
    reason: str = ""  # why `ops` is None
    is_missing: bool = False  # whether building the library would help


@functools.cache
def load() -> Library:
    # `-m lm.kernels.build` imports this module
    from lm.kernels.build import INSTRUCTION_SETS, is_complete

    wanted = os.environ.get("LM_KERNELS_ISA")
    if wanted and wanted not in INSTRUCTION_SETS:
        raise UserError(f"LM_KERNELS_ISA is {wanted!r}, not one of {', '.join(INSTRUCTION_SETS)}")
    if os.environ.get("LM_KERNELS", "1") == "0":
        return Library(reason="disabled by LM_KERNELS=0")
    if tf.config.list_physical_devices("GPU"):
        return Library(reason="they are for CPUs, and there is a GPU")
    path = _path()
    if not path.exists():
        return _missing(f"not built; {_BUILD}")
    try:
        if not is_complete(path):
            raise OSError("it is damaged")
        ops = tf.load_op_library(str(path))
        found = _property("lm_kernels_isa")
    except (tf.errors.OpError, OSError, AttributeError) as error:  # AttributeError: no such symbol
        return _missing(f"cannot load {path}: {error}; {_BUILD}")
    if wanted and wanted != found:
        logger.warning("LM_KERNELS_ISA %s is not available here; using %s", wanted, found)
    return Library(ops)


def _missing(reason: str) -> Library:
    logger.warning("training is slower and not exact without compiled ops: %s", reason)
    return Library(reason=reason, is_missing=True)


def available() -> bool:
    """Return whether this process can use the compiled ops."""
    return load().ops is not None


def is_missing() -> bool:
    """Return whether building the library would make the compiled ops available."""
    return load().is_missing


def description(cpu: str = "") -> str:
    """Describe the compiled ops for the log, or explain why they are not used.

    It contains the CPU (default: the instruction set), a checksum of the sources, and the compiler.
    """
    if not available():
        return f"no compiled ops: {load().reason}"
    cpu = cpu or _property("lm_kernels_isa")
    sources, compiler = _path().stem[:8], _property("lm_kernels_compiler")
    return f"compiled ops for {cpu} ({sources}, compiler {compiler})"


def arithmetic(precision: str) -> str:
    """Describe the compiled ops. Equal descriptions mean bitwise identical results.

    All instruction sets with a fused multiply-add compute the same float32 results. In bfloat16,
    this holds for the instruction sets without bfloat16 products.
    """
    same = _has("-mfma") and (precision == "float32" or not multiplies_bfloat16())
    return description("x86-64 with FMA" if same else "")


def multiplies_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 products. Otherwise, bfloat16 is not faster."""
    return _has("-mavx512bf16")


def _has(flag: str) -> bool:
    from lm.kernels.build import INSTRUCTION_SETS  # here, as in `load`

    return available() and flag in INSTRUCTION_SETS[_property("lm_kernels_isa")]


@contextlib.contextmanager
def subnormals_are_zero() -> Iterator[None]:
    """Treat subnormal numbers as zero, as TensorFlow does, in this thread.

    Threads that start inside this context inherit the setting. A thread that adds gradients needs
    the setting for bitwise identical sums. The context has no effect if there are no compiled ops.
    """
    if not available():
        yield
        return
    flush = ctypes.CDLL(str(_path())).lm_flush_subnormals
    flush.argtypes = [ctypes.c_bool]
    flush(True)
    try:
        yield
    finally:
        flush(False)


def _property(name: str) -> str:
    """Return a text that the library contains."""
    function = getattr(ctypes.CDLL(str(_path())), name)
    function.restype = ctypes.c_char_p
    return function().decode()


@functools.cache  # the sources may change after the library was loaded
def _path() -> pathlib.Path:
    from lm.kernels.build import library_path  # here, as in `load`

    return library_path()
