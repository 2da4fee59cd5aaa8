"""The process and its operating system: /proc, malloc, packages, and seeds."""

import contextlib
import ctypes
import importlib.metadata
import itertools
import os
import platform
import random
import sys
import zlib
from collections.abc import Callable, Iterator

_SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # constants of malloc.h
_TUNABLES = "GLIBC_TUNABLES"
# A program with these variables of mpirun, srun or horovodrun would join the job of this process.
_FROM_LAUNCHER = (
    "PMIX_", "PMI_", "ORTE_", "OMPI_COMM_", "HOROVOD_SIZE", "HOROVOD_RANK", "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
)  # fmt: skip
_COMPUTE_FLAGS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "bmi")  # in /proc/cpuinfo
_libc = ctypes.CDLL(None)
_at_stop: list[Callable[[], object]] = []
PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def script(name: str) -> str:
    """Return the path of a run script for messages: the user may be in any directory."""
    path = os.path.join(PROJECT, "run_scripts", name)
    return path if os.path.exists(path) else f"run_scripts/{name}"


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def environment_without_launcher() -> dict[str, str]:
    """Return the environment for a program that does not belong to the job of this process."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_FROM_LAUNCHER)}


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


@contextlib.contextmanager
def at_stop(action: Callable[[], object]) -> Iterator[None]:
    """Call a function if a stop signal ends this process within the block."""
    _at_stop.append(action)
    try:
        yield
    finally:
        _at_stop.remove(action)


def act_at_stop() -> None:
    """Call the functions of all blocks of `at_stop`, the last one first."""
    for action in reversed(_at_stop):
        action()


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
