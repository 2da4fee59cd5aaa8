"""The process and its operating system: /proc, malloc, packages, TensorFlow's import, and seeds."""

import contextlib
import ctypes
import gc
import glob
import importlib.metadata
import itertools
import os
import platform
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow.compat.v1 as tf

_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # constants of malloc.h
_TUNABLES = "GLIBC_TUNABLES"
_OWN_THREADS = "TF_OVERRIDE_GLOBAL_THREADPOOL"
# Packages that TensorFlow imports, but that this program does not need. TensorFlow needs the
# location of the package keras itself.
_UNUSED = ("keras.src", "jax")
_COMPUTE_FLAGS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "bmi")  # in /proc/cpuinfo
_libc = ctypes.CDLL(None)
PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


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


def script(name: str) -> str:
    """Return the path of a run script for messages: the user may be in any directory."""
    path = os.path.join(PROJECT, "run_scripts", name)
    return path if os.path.exists(path) else f"run_scripts/{name}"


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, starting with the third, the state; see proc(5)."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The second field is the name in parentheses, which may contain any character.
        return file.read().rpartition(")")[2].split()


def peak_memory_mb() -> float:
    """Return the peak memory of this process."""
    # getrusage would include the peak of the process that started this one.
    with open("/proc/self/status") as file:
        peak = next(line for line in file if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


def cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_identity(path: str = "/proc/cpuinfo") -> str:
    """Return the model of the CPU, and a checksum of its features for computations."""
    with open(path) as file:
        lines = (line.partition(":") for line in itertools.takewhile(str.strip, file))
        values = {name.strip(): value.split() for name, _, value in lines}
    names = ("cpu family", "model", "stepping")
    if "flags" not in values:  # an ARM CPU
        names = ("CPU implementer", "CPU variant", "CPU part", "CPU revision", "Features")
    flags = [flag for flag in values.get("flags", []) if flag.startswith(_COMPUTE_FLAGS)]
    features = " ".join([*flags, *(str(values.get(name)) for name in names)])
    return f"{cpu_model()} ({zlib.crc32(features.encode()):08x})"


def ends_with_this_process(signal_number: int) -> Callable[[], None]:
    """Return a `preexec_fn` for a child, which gets a signal even if this process is killed."""
    parent = os.getpid()

    def follow() -> None:
        _libc.prctl(_SET_DEATH_SIGNAL, signal_number)
        if os.getppid() != parent:  # The parent died before the call.
            os._exit(1)

    return follow


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for the next step, which needs the same amount.

    Otherwise, page faults can take a quarter of a step in a virtual machine (docs/performance.md).
    All threads use one arena, because the arenas of threads cannot hold blocks above 64 MiB. Call
    this function before libraries such as NumPy start threads.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        _libc.mallopt(_M_MMAP_MAX, 0)
        _libc.mallopt(_M_ARENA_MAX, 1)


def use_huge_pages() -> None:
    """Start this program again with huge pages, if the kernel offers them to programs that ask.

    With pages of 2 MiB, a step needs fewer entries of the page table (docs/performance.md). glibc
    reads this setting only when a process starts.
    """
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    with contextlib.suppress(OSError), open(path) as file:
        if "[madvise]" in file.read() and _is_whole_process() and _TUNABLES not in os.environ:
            os.environ[_TUNABLES] = "glibc.malloc.hugetlb=1"
            os.execv(sys.executable, sys.orig_argv)


def _is_whole_process() -> bool:
    """Return whether Python was started only to run this program, not a notebook or a debugger."""
    spec = sys.modules["__main__"].__spec__  # None for a script
    program = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return sys.orig_argv[-len(sys.argv) :] == [program, *sys.argv[1:]]


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


def cpu_session() -> "tf.Session":
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


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of Python and NumPy, and restore their state at the end."""
    import numpy as np  # NumPy starts threads, but keep_freed_memory() must come first.

    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
