"""Exchanges between ranks under real mpirun."""

import pytest

from tests.commands import run_module

PROGRAMS = "gather sums probes broadcast broadcast_from_devices update fusion".split()


@pytest.mark.parametrize("num_ranks, programs", [(2, ["sums", "threads"]), (4, PROGRAMS)])
def test_exchanges_give_correct_results_on_all_ranks(num_ranks, programs):
    result = run_module("tests.parallel.rank_programs", *programs, num_ranks=num_ranks)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_launch_without_a_working_horovod_is_rejected():
    """The launcher's variables announce two processes, but MPI finds only one."""
    env = {"PMI_SIZE": "2", "PMI_RANK": "0"}
    result = run_module("tests.parallel.rank_programs", "gather", env=env)
    assert result.returncode != 0
    assert "launcher started 2 processes, but Horovod sees 1" in result.stderr
