"""Allreduce by MPI alone, started by mpirun; prints one JSON line on rank 0.

Without Horovod and without a C compiler: Open MPI's library is called directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import json
import os
import shutil
import sys
import time

from lm.distributed import mpirun


def main() -> None:
    """Time the plan on the command line: a JSON list of [bytes, count, untimed]."""
    mpi = _load()
    mpi.MPI_Init(None, None)
    rank = ctypes.c_int()
    mpi.MPI_Comm_rank(_handle(mpi, "ompi_mpi_comm_world"), ctypes.byref(rank))
    seconds = [_time_allreduce(mpi, *each) for each in json.loads(sys.argv[1])]
    if rank.value == 0:
        print(json.dumps(seconds), flush=True)
    mpi.MPI_Finalize()


def _time_allreduce(mpi: ctypes.CDLL, num_bytes: int, count: int, untimed: int) -> float:
    """Return the mean seconds of summing a buffer of float32 in place."""
    buffer = (ctypes.c_float * (num_bytes // 4))()
    in_place = ctypes.c_void_p(1)
    arguments = (in_place, buffer, len(buffer), _handle(mpi, "ompi_mpi_float"))
    arguments += (_handle(mpi, "ompi_mpi_op_sum"), _handle(mpi, "ompi_mpi_comm_world"))
    for index in range(untimed + count):
        if index == untimed:
            start = time.perf_counter()
        if mpi.MPI_Allreduce(*arguments):
            raise RuntimeError("MPI_Allreduce failed")
    return (time.perf_counter() - start) / count


def _handle(mpi: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    """Open MPI's predefined handles are the addresses of global objects."""
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))


def _load() -> ctypes.CDLL:
    mpirun.find_open_mpi()
    beside_mpirun = os.path.dirname(os.path.dirname(shutil.which("mpirun") or ""))
    names = ("libmpi.so.40", ctypes.util.find_library("mpi"))  # .40: Open MPI 4
    for name in (os.path.join(beside_mpirun, "lib", "libmpi.so.40"), *names):
        with contextlib.suppress(OSError):
            if name:
                # Global, because Open MPI's plug-ins look for its symbols there.
                return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    raise RuntimeError("libmpi was not found")


if __name__ == "__main__":
    main()
