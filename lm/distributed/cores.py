"""How many of the host's cores this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from lm.processes import stat_fields

_AT_START = os.sched_getaffinity(0)
# More than any host has; the kernel keeps those that there are, and that a container's set of
# cores allows. Not os.cpu_count(): with cores offline, or with a container's own /proc (lxcfs),
# the cores do not have the numbers from 0 to there.
_EVERY_CORE = frozenset(range(8192))
# Of a job that shares its hosts with others: "FIRST:COUNT:TOTAL", its slots of all slots of a host.
HOST_SHARE = "LM_HOST_SHARE"


def unbind_from_core() -> None:
    """Let this process use all cores that it was given; call before TensorFlow starts threads.

    Open MPI binds each of one or two ranks to a single core, which would leave most of a host
    idle. A binding that somebody asked for (taskset, srun, mpirun --bind-to) stays. Where the
    system refuses (some sandboxes do), the process stays as it was started.
    """
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, _given_cores())
        os.sched_setaffinity(0, cores_of_share(sorted(os.sched_getaffinity(0)), *_host_share()))


def _given_cores() -> Collection[int]:
    bound = "OMPI_MCA_orte_bound_at_launch" in os.environ
    if not bound or "OMPI_MCA_hwloc_base_binding_policy" in os.environ:
        return _AT_START
    # Its own choice: the cores of the launcher, the first process above that is not of the job.
    # In a container, which may hide it, every core.
    with contextlib.suppress(OSError, IndexError):
        parent = os.getppid()
        while b"OMPI_COMM_WORLD_RANK=" in Path(f"/proc/{parent}/environ").read_bytes():
            parent = int(stat_fields(parent)[1])
        return os.sched_getaffinity(parent)
    return _EVERY_CORE


def cores_of_share(cores: Sequence[int], first: int, count: int, total: int) -> Sequence[int]:
    """Return the cores of a job that has `count` of a host's `total` slots, from `first` on.

    Jobs with other slots get other cores; with fewer cores than slots, neighbours may share one.
    """
    low, high = (len(cores) * slot // total for slot in (first, first + count))
    return cores[low : max(high, low + 1)]


def _host_share() -> tuple[int, int, int]:
    first, count, total = map(int, os.environ.get(HOST_SHARE, "0:1:1").split(":"))
    return first, count, total


def count_cores() -> int:
    """Return how many cores this process was given, to whichever of them it is bound."""
    bound_to = os.sched_getaffinity(0)
    unbind_from_core()
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, bound_to)
    _, count, total = _host_share()
    # Rounded up: 1.5 cores' time is more than one thread can use.
    return math.ceil(min(cores, cpu_quota() * count / total))


def cores_of_rank(local_size: int) -> int:
    """Return how many cores this rank may use: those that it was given, shared out.

    Args:
      local_size: Ranks on this host. They share its cores out, but where a launcher that was asked
        for it (srun, mpirun --bind-to) has given each of them cores of its own.
    """
    return max(count_cores() // count_sharers(local_size), 1)


def count_sharers(local_size: int) -> int:
    """Return how many ranks of this host, itself included, were given some of this one's cores."""
    given, parent, share = set(_given_cores()), os.getppid(), []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            if int(stat_fields(pid)[1]) == parent:
                share.append(not given.isdisjoint(os.sched_getaffinity(pid)))
    if len(share) < local_size:  # each rank is the child of a script of its own
        return local_size
    return max(1, min(sum(share), local_size))


def cpu_quota(root: str = "/") -> float:
    """Return how many cores' time the control groups of this process allow it, or infinity.

    A container may see all cores of its host and be stopped for the rest of each 0.1 s once its
    share of them is used up: with a thread for each core, all of them would wait most of the time.

    Args:
      root: Where /proc and /sys are.
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError):
        for line in Path(root, "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = Path(root, "sys/fs/cgroup", "cpu" if controllers else "")
            group = mount / path.lstrip("/")
            # The limits of all groups above hold too. A container sees its own group as the mount
            # itself, and may be told a path of the host, of which nothing is there.
            for directory in (group, *group.parents):
                quotas.append(_quota(directory, controllers))
                if directory == mount:
                    break
    return min(quotas)


def _quota(group: Path, controllers: str) -> float:
    """Return the quota of one group, of a version 1 controller or, without one, of version 2."""
    try:
        if controllers:
            words = [(group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
        else:
            words = (group / "cpu.max").read_text().split()
        quota, period = map(int, words)
    except (OSError, ValueError):  # no such group, or a quota of "max"
        return math.inf
    return quota / period if quota > 0 else math.inf
