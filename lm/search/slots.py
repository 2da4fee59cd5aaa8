"""The slots of trials: the cores of one or more hosts.

Two trials never share a slot of a host. They share a core only on hosts of `--hosts` that have
fewer cores than slots.
"""

import collections
from typing import NamedTuple

from lm.distributed.cores import HOST_SLOTS, claim_cores
from lm.distributed.mpirun import slots_of_hosts
from lm.errors import UserError


class HostSlots(NamedTuple):
    """Consecutive slots of a host. Each slot takes one rank, and has its own cores."""

    host: str | None  # None: this host
    first: int
    count: int
    total: int  # slots of the host

    @property
    def variable(self) -> dict[str, str]:
        """The environment variable that restricts the ranks to these slots."""
        return {HOST_SLOTS: f"{self.first}:{self.count}:{self.total}"}


TrialSlots = tuple[HostSlots, ...]  # the slots of one trial, on one or more hosts


def divide_hosts(
    ranks_per_trial: int, parallel_trials: int | None, hosts: str | None
) -> list[TrialSlots]:
    """Divide the hosts among the trials that run at the same time; see `SearchOptions`."""
    num_trials = parallel_trials or 1
    totals: collections.Counter = collections.Counter()  # slots of each host
    if hosts is None:
        totals[None] = num_trials * ranks_per_trial
        if claim_cores() < num_trials:
            raise UserError(
                f"{num_trials} trials at a time need {num_trials} cores, and this host has"
                f" {claim_cores()}; lower --parallel_trials"
            )
    else:
        for part, count in zip(hosts.split(","), slots_of_hosts(hosts)):
            totals[part.partition(":")[0]] += count
        num_trials = parallel_trials or max(1, totals.total() // ranks_per_trial)
    slots = [(host, slot) for host, total in totals.items() for slot in range(total)]
    if len(slots) < num_trials * ranks_per_trial:
        raise UserError(
            f"hosts {hosts} have {len(slots)} slots, too few for {num_trials} trial(s) of"
            f" {ranks_per_trial} ranks at a time"
        )
    divided = []
    for trial in range(num_trials):
        own = slots[trial * ranks_per_trial : (trial + 1) * ranks_per_trial]
        by_host: dict[str | None, list[int]] = {}
        for host, slot in own:
            by_host.setdefault(host, []).append(slot)
        divided.append(
            tuple(HostSlots(host, s[0], len(s), totals[host]) for host, s in by_host.items())
        )
    return divided
