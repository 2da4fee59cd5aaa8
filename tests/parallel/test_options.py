"""The modes of --mpi_log, the timeline, and learning rates that depend on the number of ranks."""

import json

import pytest

from tests.commands import events, train


@pytest.mark.parametrize(
    "mode",
    [
        "collect",
        pytest.param("master", marks=pytest.mark.soak),
        pytest.param("workers", marks=pytest.mark.soak),  # also tested by test_train_in_python.py
    ],
)
def test_logs_a_timeline_and_a_learning_rate_that_scales_with_the_ranks(tmp_path, corpora, mode):
    run = tmp_path / "run"
    result = train(
        run, "--config", "config_test", "--data_path", corpora, "--max_steps", 12, "--noeval",
        "--mpi_log", mode, "--log_path", tmp_path / "mine.log", "--log_every_steps", 1,
        "--scale_lr_by_worker", "linear", "--timeline", tmp_path / "timeline.json", num_ranks=2,
    )  # fmt: skip
    assert result.stderr.count("training test distributed over 2 ranks") == 1
    for path, other in [
        (tmp_path / "mine.log", tmp_path / "mine.1.log"),
        (run / "log.txt", run / "log.1.txt"),
    ]:
        lines = path.read_text().splitlines()
        assert any("(this is rank 0)" in line for line in lines)
        assert any("vocabulary of 201, tokens" in line for line in lines)  # an early line
        collected = [line for line in lines if line.startswith("[rank 1]")]
        assert any("(this is rank 1)" in line for line in collected) == (mode == "collect")
        assert other.exists() == (mode == "workers")
        if other.exists():
            assert "(this is rank 1)" in other.read_text()

    assert events(run, "step")[0]["learning_rate"] == 2
    exact = events(run, "start")[0]["exact"]
    assert exact == "no: the learning rate depends on the number of ranks"
    exchanges = json.loads((tmp_path / "timeline.json").read_text())
    assert {"ALLREDUCE", "ALLGATHER"} <= {event.get("name") for event in exchanges}
