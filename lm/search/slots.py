"""The slots of trials: the cores and GPUs of one or more hosts.

Two trials never share a GPU or a slot of a host. They share a core only on hosts of `--hosts` that
have fewer cores than slots.
"""

from __future__ import annotations

import collections
import subprocess
from typing import NamedTuple

from lm.distributed import launch
from lm.distributed.devices import HOST_SLOTS, count_cores, count_gpus, named_gpus
from lm.errors import UserError

_PROBE_SECONDS = 30


class HostSlots(NamedTuple):
    """Consecutive slots of a host. Each slot takes one rank, and has its own cores and GPU."""

    host: str | None  # None: this host
    first: int
    count: int
    total: int  # slots of the host

    def variables(self) -> dict[str, str]:
        """Return the environment variables that restrict the ranks to these slots."""
        found = {HOST_SLOTS: f"{self.first}:{self.count}:{self.total}"}
        gpus = _gpus(self.host, self.total)
        if gpus is not None:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[self.first : self.first + self.count])
        return found


TrialSlots = tuple[HostSlots, ...]  # the slots of one trial, on one or more hosts


def divide_hosts(
    ranks_per_trial: int, parallel_trials: int | None, hosts: str | None
) -> list[TrialSlots]:
    """Divide the hosts among the trials that run at the same time; see `SearchOptions`."""
    num_trials = parallel_trials or 1
    totals: collections.Counter = collections.Counter()  # slots of each host
    if hosts is None:
        totals[None] = num_trials * ranks_per_trial
        if count_cores() < num_trials:
            raise UserError(
                f"{num_trials} trials at a time need {num_trials} cores, and this host has"
                f" {count_cores()}; lower --parallel_trials"
            )
    else:
        for part, count in zip(hosts.split(","), launch.slots_of_hosts(hosts)):
            totals[part.partition(":")[0]] += count
        num_trials = parallel_trials or max(1, totals.total() // ranks_per_trial)
    if hosts or ranks_per_trial > 1:
        launch.mpirun_command(1)  # raises an error if mpirun is missing
    for host, num_slots in totals.items():
        gpus = _gpus(host, num_slots)
        if gpus and len(gpus) < num_slots:
            raise UserError(
                f"{num_slots} ranks on {host or 'this host'} need {num_slots} GPUs, and"
                f" {len(gpus)} are visible; use fewer ranks, or hide the GPUs with"
                " CUDA_VISIBLE_DEVICES="
            )
    slots = [(host, slot) for host, total in totals.items() for slot in range(total)]
    if len(slots) < num_trials * ranks_per_trial:
        raise UserError(
            f"hosts {hosts} have {len(slots)} slots, too few for {num_trials} trial(s) of"
            f" {ranks_per_trial} ranks at a time"
        )
    divided = []
    for trial in range(num_trials):
        own = slots[trial * ranks_per_trial : (trial + 1) * ranks_per_trial]
        by_host = {host: [slot for name, slot in own if name == host] for host, _ in own}
        divided.append(
            tuple(HostSlots(host, s[0], len(s), totals[host]) for host, s in by_host.items())
        )
    return divided


def _gpus(host: str | None, num_slots: int) -> list[str] | None:
    """Return the GPUs that trials may use on a host, or None if the host has no GPU."""
    if named_gpus() is not None:
        return named_gpus()
    return list(map(str, range(count_gpus() if host is None else num_slots))) or None


def lost_hosts(slots: TrialSlots) -> list[str]:
    """Return the hosts of a trial on which mpirun can no longer start a process."""
    lost = []
    for host in filter(None, (own.host for own in slots)):
        command = [*launch.mpirun_command(1, f"{host}:1"), "true"]
        quiet = {"stdin": subprocess.DEVNULL, "capture_output": True}
        try:
            subprocess.run(command, env=environment(), check=True, timeout=_PROBE_SECONDS, **quiet)
        except subprocess.SubprocessError:
            lost.append(host)
    return lost


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of mpirun, without the variables of a launcher of this process."""
    # With these variables, the ranks would join the job of this process.
    from_launcher = ("PMIX_", "ORTE_", "OMPI_COMM_")
    found = launch.mpirun_environment(**changes)
    return {name: value for name, value in found.items() if not name.startswith(from_launcher)}
