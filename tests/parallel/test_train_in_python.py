"""Calls of `train` as a Python function."""

from tests.commands import run_module
from tests.parallel import train_twice


def test_two_runs_in_one_process_leave_nothing_behind(tmp_path, corpora):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    train_twice.main(str(corpora), one)
    result = run_module("tests.parallel.train_twice", corpora, two, num_ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
