"""The hosts and cores that a scheduler allocated to this job: Slurm, PBS, LSF or SGE."""

import collections
import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lm.errors import UserError

# The variables of a job's ID, and of its index in an array of jobs.
_SCHEDULERS = {
    "slurm": (("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"), ("SLURM_ARRAY_TASK_ID",)),
    "pbs": (("PBS_JOBID",), ("PBS_ARRAY_INDEX", "PBS_ARRAYID")),  # PBS Pro and OpenPBS; Torque
    "lsf": (("LSB_JOBID",), ("LSB_JOBINDEX",)),
    "sge": (("JOB_ID",), ("SGE_TASK_ID",)),
}
# The programs of schedulers that start processes on other hosts, if they are like ssh. Open MPI
# finds srun (Slurm) and qrsh (SGE) by itself.
_REMOTE_SHELLS = {"lsf": "blaunch", "pbs": "pbs_tmrsh"}


class Allocation(NamedTuple):
    """The part of a cluster that belongs to this job."""

    ranks: dict[str, int]  # ranks per host
    threads: int | None  # threads of each rank, or None if the scheduler does not limit them

    @property
    def hosts(self) -> str:
        """The hosts as mpirun's option -H expects them: "host1:2,host2:2"."""
        return ",".join(f"{host}:{count}" for host, count in self.ranks.items())


def find_scheduler() -> str | None:
    """Return the name of the scheduler that started this job, or None."""
    for name, (job_names, _) in _SCHEDULERS.items():
        if _first(job_names) and (name != "sge" or "SGE_ROOT" in os.environ):
            return name
    return None


def find_job() -> tuple[str, str]:
    """Return the job's name, such as "slurm-7_3", and its index in an array of jobs, such as "3".

    Both are empty if there is none.
    """
    scheduler = find_scheduler()
    if scheduler is None:
        return "", ""
    job_names, index_names = _SCHEDULERS[scheduler]
    job, index = re.match(r"\w*", _first(job_names))[0], _first(index_names)
    if scheduler in ("lsf", "sge") and index in ("0", "undefined"):  # the job is not an array
        index = ""
    return f"{scheduler}-{job}" + f"_{index}" * bool(index), index


def remote_shell(hosts: str | None = None) -> dict[str, str]:
    """Return the variables that tell mpirun how to start processes on `hosts`, or on $HOSTS."""
    if {"OMPI_MCA_plm", "OMPI_MCA_plm_rsh_agent"} & os.environ.keys():
        return {}
    scheduler = find_scheduler()
    shell = _REMOTE_SHELLS.get(scheduler)
    if shell and shutil.which(shell):
        return {"OMPI_MCA_plm_rsh_agent": shell}
    # Open MPI may be built for the scheduler, and then needs no program to reach other hosts.
    if shutil.which("ssh") or shutil.which("rsh") or not _is_on_one_host(hosts):
        return {}
    # Without ssh and rsh, Open MPI does not even start ranks on this host, for example in a
    # container. "isolated" must not be used for several hosts: it starts all ranks on this host.
    return {"OMPI_MCA_plm": "isolated"}


def _is_on_one_host(hosts: str | None) -> bool:
    """Return whether all ranks are on one host: by default, the hosts of the user or the job."""
    hosts = hosts or os.environ.get("HOSTS")
    if hosts or os.environ.get("HOSTFILE"):
        return bool(hosts) and "," not in hosts
    try:
        allocation = read_allocation()
        return allocation is None or len(allocation.ranks) == 1
    except UserError:  # The files of the scheduler are not in this container.
        return True


def read_allocation(num_ranks: int | None = None, per_host: int = 1) -> Allocation | None:
    """Return this job's allocation, or None outside of a job.

    Args:
      num_ranks: Number of ranks. By default, the scheduler's tasks are the ranks. If the
        scheduler only counts cores, each host has `per_host` ranks.
      per_host: Number of NUMA domains or sockets of a host, if each is to have one rank.

    Raises:
      UserError: If the scheduler's variables or files are incomplete.
    """
    scheduler = find_scheduler()
    if scheduler is None:
        return None
    cores, ranks = _READERS[scheduler]()
    if not sum((ranks or cores).values()):
        raise UserError(f"the {scheduler} job has no tasks: request at least one per host")
    if num_ranks or per_host > 1 or not ranks:
        hosts = list(cores or ranks)
        ranks = _spread(num_ranks or per_host * len(hosts), hosts)
    threads = [max(cores[host] // ranks[host], 1) for host in ranks if host in cores]
    return Allocation(ranks, min(threads, default=None))


def _first(names: Sequence[str]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _spread(num_ranks: int, hosts: Sequence[str]) -> dict[str, int]:
    """Divide ranks evenly among hosts. The first hosts have one more rank than the last hosts."""
    each, extra = divmod(num_ranks, len(hosts))
    counts = {host: each + (position < extra) for position, host in enumerate(hosts)}
    return {host: count for host, count in counts.items() if count}


# The following functions return cores per host and ranks per host. Each may be empty.
_Counts = tuple[Mapping[str, int], Mapping[str, int]]


def _read_slurm() -> _Counts:
    if "SLURM_HET_SIZE" in os.environ:  # The variables describe only the first component.
        raise UserError(
            "heterogeneous Slurm jobs are not supported: submit a job with one component"
        )
    hosts = expand_hosts(_variable("SLURM_JOB_NODELIST"))
    # Like srun, start one rank per node if the user requested no number of tasks.
    tasks = [1] * len(hosts)
    if "SLURM_NTASKS" in os.environ:
        tasks = _expand_counts(_variable("SLURM_TASKS_PER_NODE"))
    cores = _expand_counts(_variable("SLURM_JOB_CPUS_PER_NODE"))
    per_task = int(os.environ.get("SLURM_CPUS_PER_TASK", 0))
    cores = [per_task * count for count in tasks] if per_task else cores
    return dict(zip(hosts, cores)), dict(zip(hosts, tasks))


def expand_hosts(text: str) -> list[str]:
    """Return the hosts n1, n2, n09 and m for Slurm's notation "n[1-2,09],m"."""
    hosts = []
    for prefix, ranges, suffix in re.findall(r"([^\[\],]+)(?:\[([^\]]*)\]([^\[\],]*))?", text):
        for each in ranges.split(","):
            first, _, last = each.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else [""]
            hosts += [f"{prefix}{str(n).zfill(len(first))}{suffix}" for n in numbers]
    return hosts


def _expand_counts(text: str) -> list[int]:
    """Return [2, 2, 1] for Slurm's notation "2(x2),1"."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _read_pbs() -> _Counts:
    lines = dict(collections.Counter(_lines_of("PBS_NODEFILE")))  # one line per rank or core
    if "PBS_NUM_PPN" in os.environ:  # Torque counts cores
        return lines, {}
    per_host = int(os.environ.get("NCPUS", 0))  # ncpus of the first chunk
    return {host: per_host for host in lines} if per_host else {}, lines


def _read_lsf() -> _Counts:
    words = _variable("LSB_MCPU_HOSTS").split()  # "host1 16 host2 16"
    return {host: int(count) for host, count in zip(words[::2], words[1::2])}, {}


def _read_sge() -> _Counts:
    if "PE_HOSTFILE" not in os.environ:  # a job without a parallel environment
        return {socket.gethostname(): int(os.environ.get("NSLOTS", 1))}, {}
    cores: collections.Counter = collections.Counter()
    for line in _lines_of("PE_HOSTFILE"):  # host, slots, queue and processors
        host, slots = line.split()[:2]
        cores[host] += int(slots)
    return dict(cores), {}


def _lines_of(name: str) -> list[str]:
    """Return the lines of the file that an environment variable names."""
    path = _variable(name)
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise UserError(
            f"the scheduler's {name}={path} is not readable ({error.strerror}): run this on the"
            " first host of the job, or set HOSTS=host1:1,host2:1; in a container, set"
            " HOSTS=localhost:2 or bind the directory of this file"
        ) from error


def _variable(name: str) -> str:
    if not os.environ.get(name):
        raise UserError(f"the scheduler did not set {name}: set HOSTS=host1:1,host2:1")
    return os.environ[name]


_READERS = {"slurm": _read_slurm, "pbs": _read_pbs, "lsf": _read_lsf, "sge": _read_sge}
