"""The modes of --mpi_log."""

import pytest

from tests.commands import train


@pytest.mark.parametrize(
    "mode",
    [
        "collect",
        pytest.param("master", marks=pytest.mark.soak),
        pytest.param("workers", marks=pytest.mark.soak),  # also tested by train_twice.py
    ],
)
def test_the_mode_selects_the_ranks_and_files_of_log_lines(tmp_path, corpora, mode):
    result = train(
        tmp_path / "run",
        *("--config", "config_test", "--data_path", corpora, "--max_steps", 10, "--noeval"),
        *("--mpi_log", mode, "--log_path", tmp_path / "mine.log"),
        num_ranks=2,
    )
    assert result.stderr.count("training test distributed over 2 ranks") == 1
    for path, other in [
        (tmp_path / "mine.log", tmp_path / "mine.1.log"),
        (tmp_path / "run" / "log.txt", tmp_path / "run" / "log.1.txt"),
    ]:
        lines = path.read_text().splitlines()
        assert any("(this is rank 0)" in line for line in lines)
        assert any("vocabulary of 201 words" in line for line in lines)  # an early line
        collected = [line for line in lines if line.startswith("[rank 1]")]
        assert any("(this is rank 1)" in line for line in collected) == (mode == "collect")
        assert other.exists() == (mode == "workers")
        if other.exists():
            assert "(this is rank 1)" in other.read_text()
