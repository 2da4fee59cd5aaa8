"""Options that need ranks: traces, and evaluation on all of them."""

import json

import pytest

from lm.errors import UserError
from lm.training.tracing import parse_steps
from tests.commands import events, run_module, train


def test_traces_load_as_chrome_traces(tmp_path, corpora):
    train(
        tmp_path / "run",
        *("--config", "config_test", "--data_path", corpora, "--max_steps", 12, "--noeval"),
        *("--timeline", tmp_path / "timeline.json", "--profile_steps", "5:6"),
        num_ranks=2,
    )
    exchanges = json.loads((tmp_path / "timeline.json").read_text())
    assert {"ALLREDUCE", "ALLGATHER"} <= {event.get("name") for event in exchanges}
    assert sorted(path.name for path in (tmp_path / "run").glob("trace-*")) == [
        "trace-5.json",
        "trace-6.json",
    ]
    operations = json.loads((tmp_path / "run" / "trace-5.json").read_text())["traceEvents"]
    assert any("ApplyGradientDescent" in str(event.get("name")) for event in operations)


def test_bad_profile_steps_are_refused(tmp_path, corpora):
    result = run_module(
        "lm.train",
        *("--config", "config_test", "--data_path", corpora, "--output_dir", tmp_path / "run"),
        *("--profile_steps", "5"),
    )
    assert result.returncode == 2 and "profile_steps must be FIRST:LAST" in result.stderr
    for steps in ("5", "6:5", "0:1", "a:b"):
        with pytest.raises(UserError, match="profile_steps must be FIRST:LAST"):
            parse_steps(steps)


def test_evaluating_on_all_ranks_gives_the_same_numbers(tmp_path, corpora):
    found = []
    for flag in ("--distributed_eval", "--nodistributed_eval"):
        arguments = ("--config", "config_test", "--data_path", corpora, "--max_steps", 20, flag)
        train(tmp_path / flag, *arguments, num_ranks=3)
        found.append(
            (
                events(tmp_path / flag, "epoch")[0]["valid_perplexity"],
                events(tmp_path / flag, "test")[0]["test_perplexity"],
            )
        )
    assert found[0] == pytest.approx(found[1], rel=1e-9)
