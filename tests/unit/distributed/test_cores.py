"""A process counts the cores it may use, up to the CPU quota of its container."""

import math
import os
import shlex
import socket
import sys

import pytest

from lm.distributed import cores
from lm.distributed.communicator import Communicator
from tests.commands import environment, run_command
from tests.meeting import on_ranks


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {}, math.inf),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "50000 100000\n"}, 0.5),
        # In this container, the cgroup has its path on the host, but is mounted as the root.
        ("0::/docker/c0de\n", {"cpu.max": "200000 100000\n"}, 2),
        ("5:cpuset:/\n0::/a\n", {"a/cpu.max": "250000 100000\n"}, 2.5),
        ("5:cpuset:/\n", {"cpu.max": "nonsense"}, math.inf),
        # Version 1
        (
            "5:cpuset:/\n4:cpu,cpuacct:/a/b\n",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        # The directory has a different order of the names, and links with one name.
        (
            "4:cpuacct,cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "400000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        (None, {}, math.inf),
    ],
)
def test_the_quota_of_the_control_groups(tmp_path, groups, files, quota):
    if groups:
        files = {"../../../proc/self/cgroup": groups, **files}
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert cores.cpu_quota(str(tmp_path)) == quota


def test_only_ranks_with_common_cores_share_them():
    every = sorted(os.sched_getaffinity(0))
    if len(every) < 2:
        pytest.skip("needs two cores")

    def sharers(*bindings):
        def work(rank, gather):
            comm = Communicator()
            comm.local_size, comm.gather = 2, gather
            os.sched_setaffinity(0, bindings[rank])  # of this thread only
            return cores.count_sharers(comm)

        return on_ranks(2, work)

    assert sharers(every, every) == sharers(every, every[1:]) == [2, 2]
    assert sharers(every[:1], every[1:]) == [1, 1]


def test_the_quota_limits_the_number_of_cores(monkeypatch):
    all_cores = cores.claim_cores()
    assert 1 <= all_cores <= os.cpu_count()
    for quota, count in ((0.3, 1), (all_cores - 0.5, all_cores), (math.inf, all_cores)):
        monkeypatch.setattr(cores, "cpu_quota", lambda quota=quota: quota)
        assert cores.claim_cores() == count


@pytest.mark.parametrize(
    ("ranks", "quota", "slots", "threads"),
    [(1, 1.5, "0:1:1", 2), (2, 16, "0:1:1", 8), (2, 16, "0:1:2", 4), (8, 4, "0:1:1", 1),
     (2, math.inf, "0:1:1", 16)],
)  # fmt: skip
def test_ranks_with_separate_cores_share_the_quota(monkeypatch, ranks, quota, slots, threads):
    comm = Communicator()  # no other rank has cores of this rank
    comm.local_size = ranks
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setenv(cores.HOST_SLOTS, slots)
    assert cores.count_threads(comm, math.ceil(min(16, quota))) == threads


# One write per line: the lines of two ranks must not interleave, even with PYTHONUNBUFFERED=1.
COUNT = "import os, lm.distributed.cores as c; os.write(1, b'%d\\n' % c.claim_cores())"


@pytest.mark.parametrize(
    ("launch", "counted"),
    [
        ("", os.cpu_count()),
        ("taskset -c {core}", 1),
        ("mpirun -np 2", os.cpu_count()),
        ("mpirun -np 2 sh -c '\"$@\"; true' -", os.cpu_count()),
        # A core may have several hardware threads, each of which Linux counts.
        ("mpirun -np 1 --bind-to hwthread", 1),
        ("mpirun -np 1 --use-hwthread-cpus --map-by slot:PE=1", 1),
        ("mpirun -np 1 --use-hwthread-cpus --map-by core:OVERSUBSCRIBE,PE=1", 1),
        ("mpirun -np 2 --cpu-set {core} --oversubscribe", 1),
        ("mpirun -np 2 --cpu-list {core} --oversubscribe", 1),
        ("mpirun -np 1 --use-hwthread-cpus --rankfile {rankfile}", 1),
        ("mpirun -np 2 --bind-to none", os.cpu_count()),
        ("taskset -c {core} mpirun -np 2 --oversubscribe", 1),
    ],
)
def test_only_an_explicitly_requested_binding_is_kept(tmp_path, launch, counted):
    """The default binding of Open MPI is undone, even if mpirun starts a shell in between."""
    if len(os.sched_getaffinity(0)) < os.cpu_count() or cores.cpu_quota() < os.cpu_count():
        pytest.skip("needs all cores of the machine")
    host = socket.gethostname()
    rankfile = tmp_path / "ranks"
    rankfile.write_text(f"rank 0={host} slot=0\n")
    launch = launch.format(core=max(os.sched_getaffinity(0)), rankfile=rankfile)
    command = [*shlex.split(launch), sys.executable, "-c", COUNT]
    # Open MPI's own defaults apply, except that two ranks may share a core.
    preferences = "OMPI_MCA_hwloc_", "OMPI_MCA_rmaps_base_mapping"
    env = {k: v for k, v in environment().items() if not k.startswith(preferences)}
    result = run_command(command, env, timeout=60)
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.split()) == {str(counted)}


@pytest.mark.parametrize(
    "siblings, expected",
    [
        (["0,2", "1,3", "0,2", "1,3"], [0, 2, 1, 3]),  # Linux on most servers
        (["0-1", "0-1", "2-3", "2-3"], [0, 1, 2, 3]),
        ([], [0, 1, 2, 3]),  # this container does not show them
    ],
)
def test_the_hyperthreads_of_a_physical_core_are_neighbors(tmp_path, siblings, expected):
    for core, threads in enumerate(siblings):
        directory = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{threads}\n")
    found = cores.by_physical_core({3, 2, 1, 0}, str(tmp_path))
    assert found == expected


def test_a_process_may_bind_itself(monkeypatch):
    core = max(os.sched_getaffinity(0))

    def claim_twice(*_):
        os.sched_setaffinity(0, {core})  # of this thread only
        return [(cores.claim_cores(), os.sched_getaffinity(0)) for _ in range(2)]

    assert on_ranks(1, claim_twice) == [[(1, {core})] * 2]
    monkeypatch.setenv(cores.HOST_SLOTS, "0:1:2")
    # A second claim must not divide the cores of the slot again.
    assert cores._given_cores() is cores._CORES_AT_START


def test_a_system_that_rejects_unbinding_is_accepted(monkeypatch):
    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    available = min(len(os.sched_getaffinity(0)), cores.cpu_quota())
    assert cores.claim_cores() == math.ceil(available)
