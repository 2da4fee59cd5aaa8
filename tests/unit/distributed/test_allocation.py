"""The allocations of schedulers, and the placement of ranks."""

import os

import pytest

from lm.distributed import allocation
from lm.distributed.allocation import find_job, read_allocation
from lm.distributed.cores import core_ranges
from lm.distributed.mpirun import count_places, place_settings
from lm.errors import UserError

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[09-10],m"}
SLURM |= {"SLURM_JOB_CPUS_PER_NODE": "16(x2),8"}
LSF = {"LSB_JOBID": "7", "LSB_JOBINDEX": "0", "LSB_MCPU_HOSTS": "a 16 b 8"}
SGE = {"JOB_ID": "7", "SGE_ROOT": "/sge", "SGE_TASK_ID": "undefined", "PE_HOSTFILE": "hosts"}
PBS = {"PBS_JOBID": "7[3].server", "PBS_ARRAY_INDEX": "3", "PBS_NODEFILE": "hosts"}


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Return a function that sets the variables of a scheduler's job, and no others."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("SLURM_", "LSB_", "PBS_")):
            monkeypatch.delenv(name)

    def set_variables(variables, hosts=""):
        (tmp_path / "hosts").write_text(hosts)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize(
    "variables, hosts, num_ranks, name, expected, threads",
    [
        # Without --ntasks, one rank per node, like srun
        (SLURM, "", 0, "slurm-7", "n09:1,n10:1,m:1", 8),
        (
            {**SLURM, "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"},
            "", 0, "slurm-7", "n09:2,n10:2,m:1", 8,
        ),
        (
            {**SLURM, "SLURM_CPUS_PER_TASK": "4", "SLURM_ARRAY_JOB_ID": "6",
             "SLURM_ARRAY_TASK_ID": "2"},
            "", 0, "slurm-6_2", "n09:1,n10:1,m:1", 4,
        ),
        (LSF, "", 0, "lsf-7", "a:1,b:1", 8),
        (LSF, "", 3, "lsf-7", "a:2,b:1", 8),
        ({**LSF, "LSB_JOBINDEX": "4"}, "", 1, "lsf-7_4", "a:1", 16),
        (SGE, "a 16 all.q@a <NULL>\nb 8 all.q@b <NULL>\na 4 x y\n", 0, "sge-7", "a:1,b:1", 8),
        ({**PBS, "NCPUS": "8"}, "a\nb\na\nb\n", 0, "pbs-7_3", "a:2,b:2", 4),  # PBS Pro: ranks
        ({**PBS, "PBS_NUM_PPN": "2"}, "a\na\nb\nb\n", 0, "pbs-7_3", "a:1,b:1", 2),  # Torque: cores
        (PBS, "a\nb\n", 0, "pbs-7_3", "a:1,b:1", None),
    ],
)  # fmt: skip
def test_ranks_and_threads_come_from_the_scheduler(
    job, variables, hosts, num_ranks, name, expected, threads
):
    job(variables, hosts)
    found = read_allocation(num_ranks)
    assert (found.hosts, found.threads) == (expected, threads)
    assert find_job() == (name, name.partition("_")[2])


def test_there_is_no_allocation_outside_of_a_job(job):
    job({"JOB_ID": "7"})  # other programs use this name too
    assert read_allocation() is None and find_job() == ("", "")


@pytest.mark.parametrize(
    "variables, message",
    [
        ({**SLURM, "SLURM_NTASKS": "0", "SLURM_TASKS_PER_NODE": "0(x3)"}, "job has no tasks"),
        (PBS, "the pbs job has no tasks: request at least one per host"),
        ({**PBS, "PBS_NODEFILE": "gone"}, "PBS_NODEFILE=gone is not readable .No such file"),
        ({"LSB_JOBID": "7"}, "did not set LSB_MCPU_HOSTS: set HOSTS="),
    ],
)
def test_an_incomplete_allocation_is_an_error_with_a_fix(job, variables, message):
    job(variables)
    with pytest.raises(UserError, match=message):
        read_allocation()


def test_a_host_has_one_rank_per_numa_domain(job, monkeypatch, tmp_path):
    job({**LSF, "PLACE": "numa"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    for core, (socket, node) in {0: (0, 0), 1: (0, 1), 2: (1, 2), 5: (1, 2), 6: (2, 3)}.items():
        directory = tmp_path / f"sys/devices/system/cpu/cpu{core}"
        (directory / f"node{node}").mkdir(parents=True)
        (directory / "topology").mkdir()
        (directory / "topology/physical_package_id").write_text(f"{socket}\n")
    assert core_ranges() == "0-2,5"
    assert count_places(str(tmp_path)) == 3  # the domains of the other cores do not count
    found = read_allocation(per_host=3)
    assert (found.hosts, found.threads) == ("a:3,b:3", 2)
    assert set(place_settings().values()) == {"numa"}
    monkeypatch.setenv("PLACE", "socket")
    assert count_places(str(tmp_path)) == 2
    monkeypatch.setenv("PLACE", "")
    assert count_places(str(tmp_path)) == 1
    assert set(place_settings().values()) == {"slot", "none"}


def test_slurms_notation_of_hosts():
    assert allocation.expand_hosts("n[1-2,09]-ib,m") == ["n1-ib", "n2-ib", "n09-ib", "m"]
