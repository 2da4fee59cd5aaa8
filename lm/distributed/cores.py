"""How many of the host's cores this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

# More than any host has; the kernel keeps those that there are, and that a container's or a
# scheduler's set of cores allows. Not os.cpu_count(): with cores offline, or with a container's
# own /proc (lxcfs), the cores do not have the numbers from 0 to there.
_EVERY_CORE = range(8192)
# Of a job that shares its hosts with others: "FIRST:COUNT:TOTAL", its slots of all slots of a host.
HOST_SHARE = "LM_HOST_SHARE"


def unbind_from_core() -> None:
    """Let this process use all cores that it may; call before TensorFlow starts threads.

    Open MPI binds each of one or two ranks to a single core, which would leave most of a host
    idle. Where the system refuses (some sandboxes do), the process stays as it was started.
    """
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, _EVERY_CORE)
        os.sched_setaffinity(0, cores_of_share(sorted(os.sched_getaffinity(0)), *_host_share()))


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
    """Return how many cores this process may use, whatever its launcher bound it to."""
    bound_to = os.sched_getaffinity(0)
    unbind_from_core()
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, bound_to)
    _, count, total = _host_share()
    # Rounded up: 1.5 cores' time is more than one thread can use.
    return math.ceil(min(cores, cpu_quota() * count / total))


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
