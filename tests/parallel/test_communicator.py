"""Exchanges between ranks under real mpirun."""

from tests.commands import run_module


def test_exchanges_give_correct_results_on_all_ranks():
    programs = ("gather", "large_sum", "broadcast", "broadcast_from_devices", "update", "fusion")
    result = run_module("tests.parallel.rank_programs", *programs, num_ranks=3)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_launch_without_a_working_horovod_is_rejected():
    """The launcher's variables announce two processes, but MPI finds only one."""
    env = {"PMI_SIZE": "2", "PMI_RANK": "0"}
    result = run_module("tests.parallel.rank_programs", "gather", env=env)
    assert result.returncode != 0
    assert "launcher started 2 processes, but Horovod sees 1" in result.stderr
