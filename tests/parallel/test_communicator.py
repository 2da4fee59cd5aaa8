"""Exchanges between ranks under real mpirun."""

import subprocess
import sys

from tests.commands import ROOT, environment, run_module


def test_exchanges_give_correct_results_on_all_ranks():
    programs = ("gather", "large_sum", "broadcast", "weights", "update", "fusion")
    result = run_module("tests.parallel.rank_programs", *programs, num_ranks=3)
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
