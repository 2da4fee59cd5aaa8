"""Exchanges between ranks under real mpirun."""

import subprocess
import sys

import pytest

from tests.commands import ROOT, environment, run_module


@pytest.mark.parametrize(
    "programs, num_ranks",
    [
        (["gather", "large_sum", "broadcast"], 2),
        (["gather", "update", "large_sum", "fusion"], 3),
    ],
)
def test_exchanges_give_correct_results_on_all_ranks(programs, num_ranks):
    result = run_module("tests.parallel.rank_programs", *programs, num_ranks=num_ranks)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_launch_without_a_working_horovod_is_rejected():
    """The launcher's variables announce two processes, but MPI finds only one."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.parallel.rank_programs", "gather"],
        cwd=ROOT,
        env=environment(PMI_SIZE="2", PMI_RANK="0"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    assert "launcher started 2 processes, but Horovod sees 1" in result.stderr
