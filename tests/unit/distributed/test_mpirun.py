"""The command and the environment of mpirun."""

import os
import re
import shutil
import socket
import sys

import pytest

from lm.distributed.mpirun import (
    mpirun_command,
    mpirun_environment,
    passed_variables,
    ranks_on,
    slots_of_hosts,
)
from lm.errors import UserError
from tests.commands import ROOT, run_command


def test_the_run_scripts_get_the_settings_of_python():
    given = {"OMPI_MCA_hwloc_base_binding_policy": "core", "NCCL_DEBUG": "a b", "HOSTS": "x:1"}
    script = (
        f'eval "$({sys.executable} -m lm.distributed)"; echo "${{pass_on[@]}}";'
        " env | grep ^OMPI_MCA_"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **given}
    lines = run_command(["bash", "-c", script], env, timeout=30).stdout.splitlines()
    assert lines[0] == "-x PATH -x PYTHONPATH -x NCCL_DEBUG"
    found = dict(line.split("=") for line in lines[1:])
    assert found["OMPI_MCA_hwloc_base_binding_policy"] == "core"  # the user's choice
    assert found["OMPI_MCA_rmaps_base_oversubscribe"] == "1"


def test_options_of_mpirun_take_precedence_over_the_defaults():
    show = "echo $OMPI_MCA_hwloc_base_binding_policy $OMPI_MCA_odls_base_sigkill_timeout"
    for options, shown in ((["--bind-to", "core"], "core 4"), ([], "none 4")):
        command = [*mpirun_command(1), *options, "sh", "-c", show]
        result = run_command(command, mpirun_environment(), timeout=30)
        assert result.stdout == f"{shown}\n", result.stderr


@pytest.mark.parametrize("flags", ["--map-by slot:PE=1", "--rankfile ranks", "-npernode 2"])
def test_options_that_place_ranks_replace_the_default_placement(monkeypatch, tmp_path, flags):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    host = socket.gethostname()
    (tmp_path / "ranks").write_text(f"rank 0={host} slot=0\nrank 1={host} slot=1\n")
    monkeypatch.setenv("MPIRUN_FLAGS", flags)
    show = ["grep", "Cpus_allowed_list", "/proc/self/status"]
    command = [*mpirun_command(2), *flags.split(), *show]
    result = run_command(command, mpirun_environment(), timeout=30, cwd=tmp_path)
    assert len({*result.stdout.splitlines()}) == 2, result  # Unbound ranks have the same cores.


def test_ranks_without_hosts_stay_on_this_host_of_a_job():
    job = {"SLURM_JOBID": "7", "SLURM_NODELIST": "n1,n2", "SLURM_TASKS_PER_NODE": "1(x2)"}
    command = [*mpirun_command(2), "sh", "-c", "echo $OMPI_COMM_WORLD_LOCAL_SIZE"]
    result = run_command(command, mpirun_environment(**job), timeout=30)
    assert result.stdout == "2\n2\n", result.stderr


def test_environment_variables_are_passed_to_other_hosts(monkeypatch):
    path = os.environ["PATH"]
    for name in passed_variables()[1::2]:
        monkeypatch.delenv(name)
    names = "PATH PYTHONPATH UCX_IB_GID_INDEX UCX_TLS HOROVOD_FUSION_THRESHOLD".split()
    names += "GLIBC_TUNABLES NCCL_IB_DISABLE https_proxy".split()
    for name in names:
        monkeypatch.setenv(name, path)
    passed = " ".join(f"-x {name}" for name in names)
    command = " ".join(mpirun_command(3, "host1:2,host2"))
    assert command.endswith(f" -H host1:2,host2 {passed}")
    assert ranks_on(1, "host3")[-16:] == passed.split()
    assert "-x" not in mpirun_command(2)


def test_a_missing_mpirun_is_an_error_with_a_fix(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=re.escape(f"source {ROOT}/run_scripts/env.sh")):
        mpirun_command(2)


def test_environment_lets_root_and_hosts_without_ssh_start_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = mpirun_environment(MINE="1")
    assert found["OMPI_ALLOW_RUN_AS_ROOT"] == found["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert (found["OMPI_MCA_plm"], found["MINE"]) == ("isolated", "1")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in mpirun_environment()


def test_slurms_limits_of_one_task_do_not_reach_the_daemons_of_mpirun(monkeypatch):
    for name in ("SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK"):
        monkeypatch.setenv(name, "3")
    assert not [name for name in mpirun_environment() if "PER_TASK" in name]


def test_a_job_on_several_hosts_is_not_limited_to_this_host(monkeypatch, tmp_path):
    """In a container, a scheduler's job has neither the scheduler's programs nor ssh."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "host1 2 host2 2")
    assert "OMPI_MCA_plm" not in mpirun_environment()
    assert mpirun_environment("host1:2")["OMPI_MCA_plm"] == "isolated"
    monkeypatch.setenv("HOSTS", "localhost:2")
    assert mpirun_environment()["OMPI_MCA_plm"] == "isolated"
    monkeypatch.delenv("HOSTS")
    for hosts in ("host1 2", ""):
        monkeypatch.setenv("LSB_MCPU_HOSTS", hosts)
        assert mpirun_environment()["OMPI_MCA_plm"] == "isolated"
    (tmp_path / "blaunch").touch(mode=0o755)
    assert mpirun_environment()["OMPI_MCA_plm_rsh_agent"] == "blaunch"
    monkeypatch.delenv("LSB_JOBID")
    assert mpirun_environment()["OMPI_MCA_plm"] == "isolated"
    assert "OMPI_MCA_plm" not in mpirun_environment("host1:1,host2:1")
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "kubexec.sh")
    assert mpirun_environment()["OMPI_MCA_plm_rsh_agent"] == "kubexec.sh"
    assert "OMPI_MCA_plm" not in mpirun_environment()


def test_libraries_of_a_module_do_not_replace_those_of_mpirun(monkeypatch, tmp_path):
    if shutil.which("mpirun") != f"{sys.prefix}/bin/mpirun":
        pytest.skip("this environment uses the Open MPI of the host")
    for name in ("libopen-pal.so.40", "libopen-rte.so.40"):
        (tmp_path / name).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    command = [*mpirun_command(1), "echo", "started"]
    assert "file too short" in run_command(command, os.environ, timeout=30).stderr
    result = run_command(command, mpirun_environment(), timeout=30)
    assert result.stdout == "started\n", result.stderr


def test_slots_are_read_from_the_list_of_hosts():
    assert slots_of_hosts("host1:2,host2") == [2, 1]


@pytest.mark.parametrize("hosts", ["a:many", "a:2,", ":2", "", "a:-1,b:2", "a:0", "a:1 b:1"])
def test_invalid_hosts_are_rejected(hosts):
    with pytest.raises(UserError, match="hosts must be like"):
        slots_of_hosts(hosts)
