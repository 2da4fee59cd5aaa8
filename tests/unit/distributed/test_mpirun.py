"""mpirun's command line: the same from Python as from the run scripts."""

import subprocess

import pytest

from lm.distributed import mpirun
from lm.errors import UserError
from tests.commands import ROOT


def test_python_and_the_run_scripts_give_the_same_options():
    script = f'source {ROOT}/run_scripts/env.sh; echo mpirun -np 3 "${{mpirun_options[@]}}"'
    echoed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert mpirun.command(3) == echoed.stdout.split()


def test_python_and_the_run_scripts_pass_the_same_variables_on(monkeypatch):
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "OPAL_PREFIX", "NCCL_DEBUG", "HOME"):
        monkeypatch.setenv(name, "x")
    script = f'source {ROOT}/run_scripts/env.sh; echo "${{pass_on[@]}}"'
    echoed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert mpirun.ranks_on(3, "a:3")[4:] == echoed.stdout.split()


def test_other_hosts_are_told_what_they_need(monkeypatch):
    for name in ("LD_LIBRARY_PATH", "OPAL_PREFIX", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    command = " ".join(mpirun.command(3, "host1:2,host2"))
    assert " -H host1:2,host2 " in command and " -mca btl ^openib " in command
    assert command.endswith("-x PATH -x PYTHONPATH")
    assert mpirun.ranks_on(1, "host3")[-4:] == ["-x", "PATH", "-x", "PYTHONPATH"]
    assert "-x" not in mpirun.command(2)


def test_without_mpirun_there_is_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"source run_scripts/env\.sh"):
        mpirun.command(2)


def test_environment_lets_root_and_hosts_without_ssh_start_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in (
        "OMPI_ALLOW_RUN_AS_ROOT",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
        "OMPI_MCA_plm",
        "SLURM_JOB_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    found = mpirun.environment(MINE="1")
    assert found["OMPI_ALLOW_RUN_AS_ROOT"] == found["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert (found["OMPI_MCA_plm"], found["MINE"]) == ("isolated", "1")
    # There srun starts the other hosts' daemons; "isolated" would keep mpirun on its own.
    assert "OMPI_MCA_plm" not in mpirun.environment(SLURM_JOB_ID="7")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert mpirun.root_permission() == {}


def test_slots():
    assert mpirun.slots("host1:2,host2") == [2, 1]


@pytest.mark.parametrize("hosts", ["a:many", "a:2,", ":2", "", "a:-1,b:2", "a:0", "a:1 b:1"])
def test_bad_hosts_are_refused(hosts):
    with pytest.raises(UserError, match="hosts must be like"):
        mpirun.slots(hosts)
