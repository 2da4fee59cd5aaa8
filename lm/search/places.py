"""The hosts, cores and GPUs of each trial.

Two trials never share a GPU or a slot of a host. They share a core only on hosts of `--hosts` that
have fewer cores than slots.
"""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from lm.distributed import launch
from lm.distributed.devices import HOST_SLOTS, count_cores, count_gpus, named_gpus
from lm.errors import UserError

_PROBE_SECONDS = 30


class HostSlots(NamedTuple):
    """Consecutive slots of a host. Each slot takes one rank, with its cores and its GPU."""

    host: str | None  # None: this host
    first: int
    count: int
    total: int  # slots of the host

    def variables(self) -> dict[str, str]:
        """Return the environment variables that restrict the ranks to these slots."""
        found = {HOST_SLOTS: f"{self.first}:{self.count}:{self.total}"}
        gpus = named_gpus()
        if gpus is None:
            numbers = range(count_gpus() if self.host is None else self.total)
            gpus = [str(number) for number in numbers] or None
        if gpus is not None:
            own = gpus[self.first : self.first + self.count]
            found["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        return found


TrialSlots = tuple[HostSlots, ...]  # where one trial runs: slots on one or more hosts


def divide_hosts(
    ranks_per_trial: int, parallel_trials: int | None, hosts: str | None
) -> list[TrialSlots]:
    """Divide the hosts among the trials that run at the same time.

    Args:
      ranks_per_trial: Slots of each trial.
      parallel_trials: Number of trials. None means 1, or with hosts as many as fit.
      hosts: Hosts and slots in the form of mpirun's -H, or None for this host.

    Raises:
      UserError: If there are too few slots, cores or GPUs, or if mpirun is missing.
    """
    if hosts is None:
        return _divide_this_host(ranks_per_trial, parallel_trials or 1)
    names = [part.partition(":")[0] for part in hosts.split(",")]
    if len(set(names)) < len(names):
        raise UserError(f"hosts {hosts} name a host twice; write host:slots once per host")
    totals = dict(zip(names, launch.slots_of_hosts(hosts)))
    launch.mpirun_command(1)  # raises if mpirun is missing
    _check_gpus_of_hosts(hosts, max(totals.values()))
    slots = [(name, slot) for name, total in totals.items() for slot in range(total)]
    num_fitting = len(slots) // ranks_per_trial
    if num_fitting < (parallel_trials or 1):
        raise UserError(
            f"hosts {hosts} have {len(slots)} slots, too few for {parallel_trials or 1}"
            f" trial(s) of {ranks_per_trial} ranks at a time"
        )
    divided = []
    for trial in range(parallel_trials or num_fitting):
        own = slots[trial * ranks_per_trial : (trial + 1) * ranks_per_trial]
        by_host = {name: [slot for host, slot in own if host == name] for name, _ in own}
        divided.append(
            tuple(HostSlots(name, s[0], len(s), totals[name]) for name, s in by_host.items())
        )
    return divided


def _divide_this_host(ranks_per_trial: int, num_trials: int) -> list[TrialSlots]:
    if ranks_per_trial > 1:
        launch.mpirun_command(ranks_per_trial)  # raises if mpirun is missing
    named, total = named_gpus(), num_trials * ranks_per_trial
    num_gpus = count_gpus() if named is None else len(named)
    if 0 < num_gpus < total:
        raise UserError(
            f"{num_trials} trial(s) of {ranks_per_trial} rank(s) at a time need {total} GPUs, and"
            f" this host has {num_gpus}; lower --parallel_trials or --ranks_per_trial, or hide the"
            " GPUs with CUDA_VISIBLE_DEVICES="
        )
    if count_cores() < num_trials:
        raise UserError(
            f"{num_trials} trials at a time need {num_trials} cores, and this host has"
            f" {count_cores()}; lower --parallel_trials"
        )
    firsts = range(0, total, ranks_per_trial)
    return [(HostSlots(None, first, ranks_per_trial, total),) for first in firsts]


def _check_gpus_of_hosts(hosts: str, most_slots: int) -> None:
    gpus = named_gpus()
    if gpus and not all(name.isdigit() for name in gpus):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={','.join(gpus)} names GPUs of this host; with --hosts, use GPU"
            " numbers, which are the same on all hosts"
        )
    if gpus and len(gpus) < most_slots:
        raise UserError(
            f"hosts {hosts} have up to {most_slots} slots, and CUDA_VISIBLE_DEVICES names only"
            f" {len(gpus)} GPUs; use fewer slots or more GPUs, or hide the GPUs with"
            " CUDA_VISIBLE_DEVICES="
        )


def lost_hosts(slots: TrialSlots) -> list[str]:
    """Return the hosts of a trial on which mpirun can no longer start a process."""
    return [own.host for own in slots if own.host and not _responds(own.host)]


def _responds(host: str) -> bool:
    command = [*launch.mpirun_command(1, f"{host}:1"), "true"]
    try:
        result = subprocess.run(
            command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_PROBE_SECONDS,
        )  # fmt: skip
        return result.returncode == 0
    except subprocess.TimeoutExpired:
        return False


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a trial's launcher.

    Variables of a launcher above this process are removed. With them, the new ranks would join the
    job of that launcher.
    """
    from_launcher = ("PMIX_", "ORTE_", "OMPI_COMM_")
    found = launch.mpirun_environment(**changes)
    return {name: value for name, value in found.items() if not name.startswith(from_launcher)}
