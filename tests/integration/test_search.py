"""`python -m lm.search` as a user runs it, killed and resumed; its report and its winner."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from optuna.trial import TrialState

from lm.checkpoint import choice
from lm.checkpoint import format as checkpoint
from lm.report.search import load_search
from tests.commands import (
    ROOT,
    environment,
    events,
    marked_processes,
    new_mark,
    run_command,
    run_module,
    train,
)

FLAGS = (
    "--config", "config_test", "--hidden_size", 8, "--num_steps", 5, "--num_epochs", 3,
    "--batch_size", 400, "--checkpoint_every_steps", 100, "--log_every_steps", 1,
    "--sampler", "grid", "--space", "learning_rate=0.1|0.001|1.0", "--trials", 4,
    "--ranks_per_trial", 2,
)  # fmt: skip


def values(run_dir):
    return [event["valid_perplexity"] for event in events(run_dir, "epoch")]


@pytest.mark.timeout(600)
def test_a_search_that_is_killed_goes_on_and_its_winner_can_be_trained(project, tmp_path, corpora):
    directory, log = tmp_path / "search", tmp_path / "log"
    mark = new_mark()
    command = [
        sys.executable, "-m", "lm.search", *FLAGS, "--data_path", corpora,
        "--output_dir", directory, "--parallel_trials", min(2, os.cpu_count()),
    ]  # fmt: skip
    with open(log, "w") as file:
        first = subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, env=environment(**mark),
            stdout=file, stderr=file,
        )  # fmt: skip
    trial = directory / "trials/0000"
    while not checkpoint.list_checkpoints(str(trial)):
        assert first.poll() is None, log.read_text()
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    while marked_processes(mark):  # the trials' jobs save and end of themselves
        time.sleep(0.05)
    reached = int(choice.newest(str(trial))[-8:])
    assert reached == max(event["step"] for event in events(trial, "step"))

    script = project / "run_scripts/search.sh"
    second = run_command(
        [script, "--resume", "--parallel_trials", 1], environment(OUTPUT_DIR=str(directory)), 500
    )
    assert second.returncode == 0, second.stderr
    trials = load_search(str(directory)).study.trials
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.COMPLETE]
    assert [each.state for each in trials] == states
    # The first one went on from where it was, each step done once; a bad one was saved.
    steps = [event["step"] for event in events(trial, "step")]
    assert steps == list(range(1, steps[-1] + 1)) and len(values(trial)) == 3
    assert reached < steps[-1] and len(events(trial, "start")) == 2
    pruned = directory / "trials/0001"
    assert 1 <= len(values(pruned)) < 3 and choice.newest(str(pruned))
    # The test split is for the winner alone.
    runs = [directory / f"trials/000{number}" for number in range(3)]
    assert not any(events(run, "test") for run in runs)
    best = min((each for each in trials if each.state == states[0]), key=lambda each: each.value)
    assert best.value == min(values(runs[best.number]))
    tested = float(re.search(r"test perplexity ([\d.]+)", second.stderr).group(1))
    assert 1 < tested < 300

    assert f"Test perplexity of trial {best.number}: {tested:.2f}." in second.stdout
    # The best trials, three plots of Optuna's, the learning curves, all trials.
    html = (directory / "report.html").read_text()
    assert html.count("<img") == 4 and html.count("<table>") == 2 and 'src="http' not in html
    refused = run_module("lm.report", directory, "--curves", tmp_path / "curves")
    assert refused.returncode == 2 and "--curves is of runs" in refused.stderr

    # One rank gives what two gave, also from the winner's config on its own.
    train(
        tmp_path / "again",
        "--config",
        directory / "best.py",
        "--data_path",
        corpora,
        "--test_on",
        "none",
    )
    assert values(tmp_path / "again") == values(runs[best.number])
    assert events(tmp_path / "again", "test") == []


@pytest.mark.parametrize(
    "env, space",
    [
        ({}, "learning_rate=0.3:3:log, keep_prob=0.5:1.0"),
        ({"SPACE": "num_layers=1|2, seed=1|2"}, "num_layers=1|2, seed=1|2"),
        ({"CONFIG": "mine.py", "SPACE": "seed=1|2"}, "seed=1|2"),
        ({"CONFIG": "mine.py"}, None),
        ({"SPACE": ""}, None),
    ],
)
def test_the_script_leaves_the_space_to_the_config_file_that_suggests(project, env, space):
    python = project / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    result = run_command([project / "run_scripts/search.sh"], environment(**env), 30)
    words = result.stdout.splitlines()
    assert words[:2] == ["-m", "lm.search"] and ("--space" in words) == (space is not None)
    assert space is None or words[words.index("--space") + 1] == space


@pytest.mark.parametrize("flag", ["--output_dir=searches/a", "--config"])
def test_the_script_refuses_what_it_takes_from_the_environment(project, flag):
    result = run_command([project / "run_scripts/search.sh", flag, "mine.py"], environment(), 30)
    assert result.returncode == 2 and "set OUTPUT_DIR and CONFIG" in result.stderr


def test_a_bad_search_is_one_line_and_makes_nothing(tmp_path):
    result = run_module(
        "lm.search", "--space", "keep_prob=0:1", "--output_dir", tmp_path / "search"
    )
    assert result.returncode == 2 and not (tmp_path / "search").exists()
    (line,) = result.stderr.splitlines()
    assert line == "lm: error: space: keep_prob must be greater than 0, not 0.0"
