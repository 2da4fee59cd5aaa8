"""Where trials run: places that never share a GPU or a rank's slot on a host.

Nor do they share a core, but on hosts of `--hosts` that have fewer cores than slots.
"""

from __future__ import annotations

import subprocess
from typing import NamedTuple, Optional

from lm.distributed import launch
from lm.distributed.devices import HOST_SLOTS, count_cores, count_gpus, named_gpus
from lm.errors import UserError

_PROBE_SECONDS = 30


class Share(NamedTuple):
    """Some of the slots of a host; each has a rank, its cores and, if there are GPUs, its GPU."""

    host: Optional[str]  # None: this one
    first: int
    count: int
    total: int

    def variables(self) -> dict[str, str]:
        """Return what tells the ranks to keep to this share."""
        found = {HOST_SLOTS: f"{self.first}:{self.count}:{self.total}"}
        gpus = named_gpus()
        if gpus is None:
            numbers = range(count_gpus() if self.host is None else self.total)
            gpus = [str(number) for number in numbers] or None
        if gpus is not None:
            of_share = gpus[self.first : self.first + self.count]
            found["CUDA_VISIBLE_DEVICES"] = ",".join(of_share)
        return found


Place = tuple[Share, ...]  # of one trial, one share on each of its hosts


def make_places(
    ranks_per_trial: int, parallel_trials: Optional[int], hosts: Optional[str]
) -> list[Place]:
    """Divide the hosts into the places of the trials that run at a time.

    Args:
      ranks_per_trial: Slots of each place.
      parallel_trials: How many places; None for 1, or with hosts for as many as fit.
      hosts: As mpirun's -H, or None for this host.

    Raises:
      UserError: There are too few slots, cores or GPUs.
    """
    if hosts is None:
        return _places_here(ranks_per_trial, parallel_trials or 1)
    return _places_on(hosts, ranks_per_trial, parallel_trials)


def _places_here(ranks_per_trial: int, places: int) -> list[Place]:
    if ranks_per_trial > 1:
        launch.mpirun_command(ranks_per_trial)  # which says if there is no mpirun
    _check_this_host(places, ranks_per_trial)
    slots = places * ranks_per_trial
    return [(Share(None, n * ranks_per_trial, ranks_per_trial, slots),) for n in range(places)]


def _places_on(hosts: str, ranks_per_trial: int, parallel_trials: Optional[int]) -> list[Place]:
    launch.mpirun_command(1)  # which says if there is none
    names = [part.partition(":")[0] for part in hosts.split(",")]
    if len(set(names)) < len(names):
        raise UserError(f"hosts {hosts} name a host twice: write host:slots once for each")
    totals = dict(zip(names, launch.slots_of_hosts(hosts)))
    _check_gpus(hosts, max(totals.values()))
    slots_of_all = [(name, slot) for name, total in totals.items() for slot in range(total)]
    fit = len(slots_of_all) // ranks_per_trial
    if fit < (parallel_trials or 1):
        raise UserError(
            f"hosts {hosts} have {len(slots_of_all)} slots, too few for {parallel_trials or 1}"
            f" trial(s) of {ranks_per_trial} ranks at a time"
        )
    places = []
    for place in range(parallel_trials or fit):
        own = slots_of_all[place * ranks_per_trial : (place + 1) * ranks_per_trial]
        of_host = {name: [slot for host, slot in own if host == name] for name, _ in own}
        places.append(tuple(Share(name, s[0], len(s), totals[name]) for name, s in of_host.items()))
    return places


def _check_gpus(hosts: str, most_slots: int) -> None:
    gpus = named_gpus()
    if gpus and not all(name.isdigit() for name in gpus):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={','.join(gpus)} names GPUs of this host: with --hosts give"
            " their numbers, which are the same on all"
        )
    if gpus and len(gpus) < most_slots:
        raise UserError(
            f"hosts {hosts} have up to {most_slots} slots, and CUDA_VISIBLE_DEVICES names"
            f" {len(gpus)} GPUs: a slot needs one; name fewer slots or more GPUs, or hide the GPUs"
            " with CUDA_VISIBLE_DEVICES="
        )


def lost_hosts(place: Place) -> list[str]:
    """Return the hosts of a place on which mpirun starts nothing any more."""
    return [share.host for share in place if share.host and not _answers(share.host)]


def _answers(host: str) -> bool:
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

    Without what a launcher told this process: it would take the new ranks for its own.
    """
    theirs = ("PMIX_", "ORTE_", "OMPI_COMM_")
    found = launch.mpirun_environment(**changes)
    return {name: value for name, value in found.items() if not name.startswith(theirs)}


def _check_this_host(places: int, ranks_per_trial: int) -> None:
    named, slots = named_gpus(), places * ranks_per_trial
    gpus = count_gpus() if named is None else len(named)
    if 0 < gpus < slots:
        raise UserError(
            f"{places} trial(s) of {ranks_per_trial} rank(s) at a time need {slots} GPUs, and this"
            f" host shows {gpus}: lower --parallel_trials or --ranks_per_trial, or hide the"
            " GPUs with CUDA_VISIBLE_DEVICES="
        )
    if count_cores() < places:
        raise UserError(
            f"{places} trials at a time need {places} cores, and this host has {count_cores()}:"
            " lower --parallel_trials"
        )
