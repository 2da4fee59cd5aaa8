"""The environment variables of the launchers."""

import os
import pty

import pytest

from lm.distributed import launch
from tests.commands import one_error, run_code, run_module


@pytest.mark.parametrize(
    "variables, size, rank",
    [
        ({}, 1, 0),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, 2, 1),
        ({"SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "5"}, 7, 5),
        (  # mpirun in a shell under srun
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0",
             "SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "5"},
            2, 0,
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 1, 0),  # a batch script, outside srun
    ],
)  # fmt: skip
def test_the_innermost_launcher_is_used(variables, size, rank, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launch.launched_size(), launch.launched_rank()) == (size, rank)


TERMINAL = "os.open(sys.argv[1], os.O_RDWR)"
TASK = "os.environ['SLURM_TASK_PID'] = str(os.getpid())"  # not a command of its shell


@pytest.mark.parametrize("work, size", [("pass", 8), (TERMINAL, 1), (f"{TERMINAL}; {TASK}", 8)])
def test_the_shell_of_srun_is_one_process(work, size):
    """The first terminal that the leader of a session opens becomes its controlling terminal."""
    code = f"import os, sys; {work}; from lm.distributed.launch import *; print(launched_size())"
    variables = {"SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8", "SLURM_PTY_PORT": "4000"}
    variables["SLURM_TASK_PID"] = "1"  # the shell
    pair = pty.openpty()
    try:
        result = run_code(code, os.ttyname(pair[1]), env=variables, start_new_session=True)
    finally:
        for descriptor in pair:
            os.close(descriptor)
    assert result.stdout == f"{size}\n", result.stderr


@pytest.mark.parametrize("given", [{}, {"PMI_SIZE": "2", "PMI_RANK": "0"}])
def test_srun_without_pmix_is_one_line(given):
    """Open MPI would abort with 20 lines for each rank."""
    variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", **given}
    flags = ["--config", "config_test", "--corpus", "embedded", "--max_steps", 1]
    result = run_module("lm.train", *flags, env=variables)
    assert "did not connect the ranks through PMIx: use srun --mpi=pmix" in one_error(result, 2)


@pytest.mark.parametrize(
    "variables, statement",
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "time.sleep = end"),  # waits
        ({}, "atexit.register(end, 0)"),  # after the message
    ],
)
def test_a_rank_that_srun_ends_exits_with_the_code_of_the_error(variables, statement):
    code = f"""
import atexit, signal, time
from lm.cli.program import run_alone
from lm.errors import UserError

def work(_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as after the end of the supervisor
    raise UserError("wrong")

def end(_):
    signal.raise_signal(signal.SIGTERM)

{statement}
run_alone(work)
"""
    assert run_code(code, env=variables).returncode == 2
