"""The launcher of this process, such as mpirun or srun, and the connection to the other ranks."""

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence

from lm.distributed.communicator import Communicator
from lm.distributed.cores import claim_cores
from lm.errors import UserError
from lm.system import script, stat_fields
from lm.tensorflow_import import import_tensorflow

# Each launcher's variables for the number of processes and the rank. The first launcher whose
# variables are set counts: an mpirun inside a Slurm job step inherits Slurm's variables.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI's mpirun
    ("HOROVOD_SIZE", "HOROVOD_RANK"),  # horovodrun with Gloo
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # srun
)
_MPIRUN = ("mpirun", "mpiexec", "orterun")
# In the order of their dependencies.
_OPEN_MPI = ("libopen-pal.so.40", "libopen-rte.so.40", "libmpi.so.40")
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY
_TICK_SECONDS = 0.5


def launched_size() -> int:
    """Return the number of processes that the launcher started, or 1 without a launcher."""
    return next((int(os.environ[size]) for size, _ in _launchers() if size in os.environ), 1)


def launched_rank() -> int:
    """Return this process's rank according to the launcher, or 0 without a launcher."""
    ranks = (os.environ.get(rank, "0") for size, rank in _launchers() if size in os.environ)
    return int(next(ranks, "0"))


def _launchers() -> Sequence[tuple[str, str]]:
    # `srun --pty bash` gives only task 0 a terminal, so the shells of the other tasks end. The
    # commands of this shell have the terminal, but they are not the task that srun started. The
    # tasks of an srun in this shell have no terminal.
    is_in_shell = (
        "SLURM_PTY_PORT" in os.environ
        and os.environ.get("SLURM_TASK_PID") != str(os.getpid())
        and stat_fields(os.getpid())[4] != "0"
    )
    return _LAUNCHERS[:2] if is_in_shell else _LAUNCHERS


def connect() -> Communicator:
    """Connect to the other ranks, if there are any. Call this function once per process."""
    size = launched_size()
    if size == 1:
        return Communicator()
    claim_cores()  # Horovod's thread inherits the cores of this thread
    use_open_mpi_of_environment()
    import_tensorflow()
    # A single process does not need Horovod, so it is not imported at the top.
    from lm.distributed.agreement import check_agreement, code_checksum
    from lm.distributed.horovod import HorovodCommunicator

    comm = HorovodCommunicator(size)
    # Compare the code first, because versions may differ in their exchanges.
    check_agreement(comm, {"code": code_checksum()})
    return comm


def use_open_mpi_of_environment() -> None:
    """Use the Open MPI of this Python environment, if it has one.

    Raises:
      UserError: If srun started this process without the interface that this Open MPI needs.
    """
    if not os.path.exists(os.path.join(sys.prefix, "bin", "orted")):
        return
    others = {"OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "PMIX_RANK"}
    if "SLURM_STEP_NUM_TASKS" in os.environ and not others & os.environ.keys():
        raise UserError(
            "the launcher did not connect the ranks through PMIx: use srun --mpi=pmix, the mpirun"
            f" of {sys.prefix}, or {script('train_slurm.sbatch')}"
        )
    # mpirun sets the location only for ranks on its own host. srun never does.
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)
    # In LD_LIBRARY_PATH, which has priority, a module of the cluster may have a different Open MPI
    # whose libraries have the same names.
    for library in _OPEN_MPI:
        with contextlib.suppress(OSError):
            ctypes.CDLL(os.path.join(sys.prefix, "lib", library))


def mpirun_above(names: Collection[str] = (*_MPIRUN, "orted")) -> int | None:
    """Return the process ID of the mpirun, or its daemon, that started this process."""
    # The environment does not show this, because the children of a rank inherit it.
    parent = os.getppid()
    with contextlib.suppress(OSError):
        with open(f"/proc/{parent}/cmdline", encoding="utf-8", errors="replace") as file:
            if os.path.basename(file.read().split("\0")[0]) in names:
                return parent
    return None


def repeat_after_mpirun(message: str) -> None:
    """Print the last line of a message again after mpirun, so that it ends a log file.

    mpirun itself prints up to 15 lines after an error. On a terminal, the message is above them.
    """
    first, *others = message.strip().splitlines()
    line = first.partition("Traceback")[0] + others[-1] if others else first
    # The shell ends when mpirun is gone, or is a zombie that has no executable.
    script = 'while [ -e "/proc/$1/exe" ]; do sleep 0.1; done; printf "%s\\n" "$2" >&2'
    with contextlib.suppress(OSError):
        mpirun = mpirun_above(_MPIRUN)
        if mpirun and not os.isatty(console := os.open(f"/proc/{mpirun}/fd/2", _APPEND)):
            command = ["sh", "-c", script, "sh", str(mpirun), line]
            files = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=console)
            subprocess.Popen(command, start_new_session=True, **files)


def end_with_launcher() -> None:
    """End this process when its launcher dies: a killed launcher cannot end its ranks."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_TICK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
