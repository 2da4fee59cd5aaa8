"""The start of a process: its time, most of which goes into the import of TensorFlow."""

import contextlib
import gc
import os
import sys
import time

from lm.processes import stat_fields, without_stderr

_KERAS = "keras.src"  # not all of keras: TensorFlow looks where it is


def seconds_since_start() -> float:
    """Return how long ago this process was started: before Python, whose files may be far away."""
    ticks = int(stat_fields()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def import_tensorflow() -> None:
    """Import TensorFlow in half of its time, and without a word.

    It imports Keras, which nobody here calls, and Keras, where it finds it, matplotlib. A missing
    Keras is nothing to TensorFlow, and later imports find it again. The objects that the import
    makes all stay; the garbage collector would search them again and again, also later on.
    """
    if "tensorflow" in sys.modules or _KERAS in sys.modules:
        return
    sys.modules[_KERAS] = None  # an import of it fails
    gc.disable()
    try:
        # TensorFlow 2.20 and 2.21 say twice, past sys.stderr, that oneDNN is on: before they look
        # at the level that hides such messages, and so on each rank. Level 0 shows what is said.
        shown = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") == "0"
        with contextlib.nullcontext() if shown else without_stderr():
            import tensorflow  # noqa: F401
    finally:
        del sys.modules[_KERAS]
        gc.freeze()
        gc.enable()
