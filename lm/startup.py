"""The import of TensorFlow, which is most of the time to the first step."""

import contextlib
import gc
import os
import sys

_KERAS = "keras.src"  # not all of keras: TensorFlow looks where it is


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
        with _without_stderr():
            import tensorflow  # noqa: F401
    finally:
        del sys.modules[_KERAS]
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _without_stderr():
    # TensorFlow 2.20 and 2.21 say twice, past sys.stderr, that oneDNN is on: before they look at
    # the level that hides such messages, and so on each rank. Level 0 shows what is said here.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") == "0":
        yield
        return
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
