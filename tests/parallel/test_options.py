"""Traces, and learning rates that depend on the number of ranks."""

import json

import pytest

from lm.errors import UserError
from lm.events.tracing import parse_steps
from tests.commands import events, train


def test_the_learning_rate_scales_with_the_ranks_and_traces_load(tmp_path, corpora):
    train(
        tmp_path / "run",
        *("--config", "config_test", "--data_path", corpora, "--max_steps", 12, "--noeval"),
        *("--scale_lr_by_worker", "linear", "--log_every_steps", 1),
        *("--timeline", tmp_path / "timeline.json", "--profile_steps", "5:6"),
        num_ranks=2,
    )
    assert events(tmp_path / "run", "step")[0]["learning_rate"] == 2
    exact = events(tmp_path / "run", "start")[0]["exact"]
    assert exact == "no: the learning rate depends on the number of ranks"
    exchanges = json.loads((tmp_path / "timeline.json").read_text())
    assert {"ALLREDUCE", "ALLGATHER"} <= {event.get("name") for event in exchanges}
    assert sorted(path.name for path in (tmp_path / "run").glob("trace-*")) == [
        "trace-5.json",
        "trace-6.json",
    ]
    operations = json.loads((tmp_path / "run" / "trace-5.json").read_text())["traceEvents"]
    assert any("ApplyGradientDescent" in str(event.get("name")) for event in operations)


def test_invalid_profile_steps_are_rejected():
    for steps in ("5", "6:5", "0:1", "a:b"):
        with pytest.raises(UserError, match="profile_steps must be FIRST:LAST"):
            parse_steps(steps)
