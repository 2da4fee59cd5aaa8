"""Calls of `train` as a Python function."""

import pytest

from tests.commands import run_module


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_runs_in_one_process_leave_nothing_behind(tmp_path, corpora, num_ranks):
    result = run_module("tests.parallel.train_twice", corpora, tmp_path, num_ranks=num_ranks)
    assert result.returncode == 0, result.stdout + result.stderr
