"""The placement of ranks on the sockets or NUMA domains of a host ($PLACE)."""

import contextlib
import os
from pathlib import Path

from lm.errors import UserError

_PLACES = ("none", "socket", "numa")


def core_ranges() -> str:
    """Return the cores of this process, as in "0-7,16-23"."""
    ranges: list[list[int]] = []
    for core in sorted(os.sched_getaffinity(0)):
        if ranges and ranges[-1][-1] == core - 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, each)) for each in ranges)


def place() -> str:
    """Return $PLACE: each socket or NUMA domain gets a rank, which uses only its cores."""
    name = os.environ.get("PLACE") or "none"
    if name not in _PLACES:
        raise UserError(f"PLACE must be none, socket or numa, not {name!r}")
    return name


def place_settings() -> dict[str, str]:
    """Return the variables of Open MPI for $PLACE: one rank per socket or NUMA domain."""
    names = ("OMPI_MCA_rmaps_base_mapping_policy", "OMPI_MCA_hwloc_base_binding_policy")
    return {} if place() == "none" else dict.fromkeys(names, place())


def count_places(root: str = "/") -> int:
    """Return the number of sockets or NUMA domains of $PLACE that have cores of this process.

    Return 1 without $PLACE, and if the kernel does not list them.
    """
    found, cores = set(), os.sched_getaffinity(0)
    for core in cores if place() != "none" else ():
        directory = Path(root, f"sys/devices/system/cpu/cpu{core}")
        with contextlib.suppress(OSError):
            if place() == "socket":
                found.add((directory / "topology/physical_package_id").read_text())
            else:
                found.update(node.name for node in directory.glob("node[0-9]*"))
    return len(found) or 1
