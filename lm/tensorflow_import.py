"""The import of TensorFlow, its threads, and its sessions for exchanges and files."""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow.compat.v1 as tf

_OWN_THREADS = "TF_OVERRIDE_GLOBAL_THREADPOOL"
# Packages that TensorFlow imports, but that this program does not need. TensorFlow needs the
# location of the package keras itself.
_UNUSED = ("keras.src", "jax")


def _tensorflow_has_threads() -> bool:
    """Return whether TensorFlow has started to compute in this process."""
    for path in glob.glob("/proc/self/task/*/comm"):  # the names of the threads
        with contextlib.suppress(OSError), open(path, "rb") as file:  # The thread may have ended.
            if file.read().startswith(b"tf_"):
                return True
    return False


# Give each session its own threads for the work inside an operation. Otherwise, the first session
# of the process, which exchanges the facts of the ranks on one thread, would set their number.
# TensorFlow reads this variable only when it starts to compute. A notebook may have done this.
is_late = _OWN_THREADS not in os.environ and _tensorflow_has_threads()
os.environ.setdefault(_OWN_THREADS, "1")


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Discard everything that is written to file descriptor 2, even by C++ code."""
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def import_tensorflow() -> None:
    """Import TensorFlow silently, in half the usual time, and with less memory.

    TensorFlow imports Keras, which imports matplotlib, and JAX if it is installed (145 MB). If
    these imports fail, TensorFlow works without them, and users can still import them later. The
    objects that the import creates live forever, so the garbage collector should ignore them.
    """
    unused = [name for name in _UNUSED if name not in sys.modules]
    if "tensorflow" in sys.modules or "keras.src" not in unused:
        return
    sys.modules.update(dict.fromkeys(unused))  # The imports fail.
    gc.disable()
    try:
        # TensorFlow 2.20 and 2.21 print two lines about oneDNN before they read the log level.
        # Users set level 0 to see all messages.
        shown = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") == "0"
        with contextlib.nullcontext() if shown else without_stderr():
            import tensorflow as tf
        # In a notebook, TensorFlow would print messages about its sessions to stdout.
        tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.WARN)
    finally:
        for name in unused:
            del sys.modules[name]
        gc.freeze()
        gc.enable()


def cpu_session() -> tf.Session:
    """Open a session for exchanges and files. It has its own thread, and reserves no GPU memory.

    Otherwise, it would share its threads with other sessions, and a long save would block them.
    """
    import tensorflow.compat.v1 as tf

    config = tf.ConfigProto(
        device_count={"GPU": 0},
        use_per_session_threads=True,
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=1,
    )
    return tf.Session(config=config)
