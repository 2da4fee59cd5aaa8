"""The cores of this process: unbind it from a single core, and count its cores."""

import contextlib
import math
import os
import re
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

from lm.distributed.communicator import Communicator
from lm.system import stat_fields

_CORES_AT_START = os.sched_getaffinity(0)  # A second claim must not divide a slot's cores again.
# More cores than any host has. The kernel keeps the cores that exist and that the container may
# use. os.cpu_count() would not do: if cores are offline, or if a container has its own /proc
# (lxcfs), the cores are not numbered from 0 to the count.
_ALL_CORES = frozenset(range(8192))
# The slots of a job that shares its hosts with other jobs: "FIRST:COUNT:TOTAL".
HOST_SLOTS = "LM_HOST_SLOTS"
# The variables of mpirun's options --bind-to, --cpu-set, --cpu-list and --rankfile.
_BINDINGS = ("OMPI_MCA_hwloc_base_binding_", "OMPI_MCA_hwloc_base_cpu_", "OMPI_MCA_orte_rankfile")


def claim_cores() -> int:
    """Let this process use all cores of its job, and return their number.

    Call this function before TensorFlow or Horovod starts threads, which inherit the cores. Open
    MPI binds each of one or two ranks to a single core, so most of the host would be idle. A
    binding that the user requested (taskset, srun, or an option of mpirun) stays.
    """
    first, count, total = _slots()
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, _given_cores())
        cores = by_physical_core(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores_of_slots(cores, first, count, total))
    # Round up: one thread cannot use the time of 1.5 cores.
    return math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota() * count / total))


def count_threads(comm: Communicator, cores: int) -> int:
    """Return the number of threads of this rank, which has claimed these cores.

    All ranks call this function together.
    """
    _, count, total = _slots()
    # Ranks with separate cores share the quota of their container too.
    quota = cpu_quota() * count / total / comm.local_size
    return max(math.ceil(min(cores // count_sharers(comm), quota)), 1)


def count_sharers(comm: Communicator) -> int:
    """Return the number of ranks that share claimed cores with this rank, including itself.

    The ranks of a host share its cores, unless the launcher gave each rank separate cores (srun,
    mpirun --bind-to). All ranks call this function together.
    """
    host, own = socket.gethostname(), os.sched_getaffinity(0)
    cores_of_ranks = comm.gather((host, sorted(own)))
    same = sum(host == other and not own.isdisjoint(cores) for other, cores in cores_of_ranks)
    return min(same, comm.local_size)  # Several hosts may have the same name.


def core_ranges() -> str:
    """Return the cores of this process, as in "0-7,16-23"."""
    ranges: list[list[int]] = []
    for core in sorted(os.sched_getaffinity(0)):
        if ranges and ranges[-1][-1] == core - 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, each)) for each in ranges)


def _slots() -> tuple[int, ...]:
    """Return the first slot, the number of slots, and the total of the host; see `HOST_SLOTS`."""
    return tuple(map(int, os.environ.get(HOST_SLOTS, "0:1:1").split(":")))


def _given_cores() -> Collection[int]:
    mapping = os.environ.get("OMPI_MCA_rmaps_base_mapping_policy", "").upper()
    requested = "PE=" in mapping or any(name.startswith(_BINDINGS) for name in os.environ)
    if requested or "OMPI_MCA_orte_bound_at_launch" not in os.environ:
        return _CORES_AT_START if HOST_SLOTS in os.environ else os.sched_getaffinity(0)
    # Open MPI bound this process by default. Use the cores of the launcher: the first
    # ancestor outside the job. A container may hide the launcher.
    with contextlib.suppress(OSError, IndexError):
        parent = os.getppid()
        while b"OMPI_COMM_WORLD_RANK=" in Path(f"/proc/{parent}/environ").read_bytes():
            parent = int(stat_fields(parent)[1])
        return os.sched_getaffinity(parent)
    return _ALL_CORES


def by_physical_core(cores: Collection[int], root: str = "/") -> list[int]:
    """Sort cores so that the hyperthreads of a physical core are neighbors."""

    def first_thread(core: int) -> int:
        threads = Path(root, f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        with contextlib.suppress(OSError):
            return int(re.split("[,-]", threads.read_text())[0])  # "0,32" or "0-1"
        return core

    return sorted(sorted(cores), key=first_thread)


def cores_of_slots(cores: Sequence[int], first: int, count: int, total: int) -> Sequence[int]:
    """Return the cores of a job that has `count` of the `total` slots of its host, from `first` on.

    Jobs in other slots get other cores. If the host has fewer cores than slots, jobs share cores.
    """
    low, high = (len(cores) * slot // total for slot in (first, first + count))
    return cores[low : max(high, low + 1)]


def cpu_quota(root: str = "/") -> float:
    """Return the number of cores whose time the control groups grant this process, or infinity.

    A container may see all cores of its host. After a container has used its quota, the kernel
    stops its threads for the rest of each 0.1 s. One thread per core would be too many, because
    threads would wait most of the time.
    """
    mount, quotas = Path(root, "sys/fs/cgroup"), [math.inf]
    with contextlib.suppress(OSError):
        for line in Path(root, "proc/self/cgroup").read_text().splitlines():
            # Version 2 has no controllers here. Version 1 mounts each controller separately.
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            # The limits of all parent groups apply too. A container sees its own group at the
            # mount point, and the listed path may exist only on the host.
            # The order of the names may differ, as in cpu,cpuacct; a link has a single name.
            for name in {controllers, controllers and "cpu"}:
                group = mount / name / path.lstrip("/")
                quotas += map(_quota, (group, *group.parents))
    return min(quotas)


def _quota(group: Path) -> float:
    """Return the quota in cores of a control group, or infinity."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):  # versions 2 and 1
        with contextlib.suppress(OSError, ValueError):  # no such group, or its quota is "max"
            quota, period = map(int, " ".join((group / n).read_text() for n in names).split())
            if quota > 0:  # version 1 has -1 instead of "max"
                return quota / period
    return math.inf
