"""The import of TensorFlow, which is most of the time to the first step."""

import sys


def import_tensorflow() -> None:
    """Import TensorFlow without matplotlib.

    TensorFlow imports Keras, and Keras, where it finds it, matplotlib: a fifth of the whole for
    what nobody here calls. A missing matplotlib is nothing to Keras. Later imports find it again.
    """
    if "tensorflow" in sys.modules or "matplotlib" in sys.modules:
        return
    sys.modules["matplotlib"] = None  # an import of it fails
    try:
        import tensorflow  # noqa: F401
    finally:
        del sys.modules["matplotlib"]
