"""The compiled library of this process: whether it can be used, and what it is."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from lm.errors import UserError

logger = logging.getLogger("lm")


class Library(NamedTuple):
    """The ops, or why there are none."""

    ops: Any = None  # a module with a function for each op
    reason: str = ""  # why it is None
    is_missing: bool = False  # they are wanted, and could be had


@functools.cache
def load() -> Library:
    """Load the library, once.

    Raises:
      UserError: LM_KERNELS_ISA is no instruction set.
    """
    from lm.kernels.build import INSTRUCTION_SETS  # not above: `-m lm.kernels.build` imports this

    wanted = os.environ.get("LM_KERNELS_ISA")
    if wanted and wanted not in INSTRUCTION_SETS:
        raise UserError(f"LM_KERNELS_ISA is {wanted!r}, not one of {', '.join(INSTRUCTION_SETS)}")
    if os.environ.get("LM_KERNELS", "1") == "0":
        return Library(reason="switched off by LM_KERNELS=0")
    if tf.config.list_physical_devices("GPU"):
        return Library(reason="they are for CPUs, and there is a GPU")
    path = _path()
    if not path.exists():
        return Library(reason="not built; run `python -m lm.kernels.build`", is_missing=True)
    try:
        ops = tf.load_op_library(str(path))
    except (tf.errors.OpError, OSError) as error:
        return Library(reason=f"{path} does not load: {error}", is_missing=True)
    found = _told("lm_kernels_isa")
    if wanted and wanted != found:
        logger.warning("LM_KERNELS_ISA is %s, which is not to be had here: %s", wanted, found)
    return Library(ops)


def available() -> bool:
    """Return whether the compiled ops can be used in this process."""
    return load().ops is not None


def is_missing() -> bool:
    """Return whether they cannot, and could if they were built."""
    return load().is_missing


def description() -> str:
    """Return, in a few words for the log, what runs here, or why the compiled ops do not.

    Where it is the same, so are the bits: it names the instruction set, the sources (by the first
    digits of the library's name) and the compiler, whose version may choose other roundings.
    """
    if not available():
        return f"no compiled ops: {load().reason}"
    sources, compiler = _path().stem[:8], _told("lm_kernels_compiler")
    return f"compiled ops for {_told('lm_kernels_isa')} ({sources}, compiler {compiler})"


def multiplies_bfloat16() -> bool:
    """Return whether the instruction set in use multiplies bfloat16: without, it gains nothing."""
    from lm.kernels.build import INSTRUCTION_SETS  # not above: `-m lm.kernels.build` imports this

    return available() and "-mavx512bf16" in INSTRUCTION_SETS[_told("lm_kernels_isa")]


@contextlib.contextmanager
def subnormals_are_zero() -> Iterator[None]:
    """Compute in this thread, and for ever in those that it starts meanwhile, as TensorFlow's do.

    Its threads take numbers below 1.2e-38 for zeros. A thread that adds up for them and does not
    would make other bits. Nothing changes without the compiled ops.
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


def _told(name: str) -> str:
    """Return what a function of the library says of it."""
    function = getattr(ctypes.CDLL(str(_path())), name)
    function.restype = ctypes.c_char_p
    return function().decode()


@functools.cache  # sources that change meanwhile are not those that were loaded
def _path() -> pathlib.Path:
    from lm.kernels.build import library_path  # not above, as INSTRUCTION_SETS

    return library_path()
