"""The import of TensorFlow, which is most of the time to the first step."""

import gc
import sys

_KERAS = "keras.src"  # not all of keras: TensorFlow looks where it is


def import_tensorflow() -> None:
    """Import TensorFlow in half of its time: without Keras, and without a search for garbage.

    It imports Keras, which nobody here calls, and Keras, where it finds it, matplotlib. A missing
    Keras is nothing to TensorFlow, and later imports find it again. The objects that the import
    makes all stay; the garbage collector would search them again and again, also later on.
    """
    if "tensorflow" in sys.modules or _KERAS in sys.modules:
        return
    sys.modules[_KERAS] = None  # an import of it fails
    gc.disable()
    try:
        import tensorflow  # noqa: F401
    finally:
        del sys.modules[_KERAS]
        gc.freeze()
        gc.enable()
