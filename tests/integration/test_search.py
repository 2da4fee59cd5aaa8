"""Searches with `python -m lm.search` that are killed, resumed and reported."""

import subprocess
import time

import pytest
from optuna.trial import TrialState

from lm.checkpoint import store
from lm.search.study import load_study
from tests import fork_server
from tests.commands import (
    ROOT,
    environment,
    events,
    marked_processes,
    new_mark,
    run_command,
    train,
)

FLAGS = (
    "--config", "config_test", "--hidden_size", 8, "--num_steps", 5, "--num_epochs", 3,
    "--batch_size", 2000, "--checkpoint_every_steps", 20, "--log_every_steps", 1,
    "--eval_batch_size", 400,
    "--sampler", "grid", "--space", "learning_rate=0.1|0.001", "--trials", 3,
    "--ranks_per_trial", 2,
)  # fmt: skip


def values(run_dir):
    return [event["valid_perplexity"] for event in events(run_dir, "epoch")]


@pytest.mark.timeout(600)
def test_a_killed_search_is_resumed_and_its_best_config_can_be_trained(project, tmp_path, corpora):
    directory, log = tmp_path / "search", tmp_path / "log"
    mark = new_mark()
    command = [
        *fork_server.python(), "-m", "lm.search", *FLAGS, "--data_path", corpora,
        "--output_dir", directory,
    ]  # fmt: skip
    with open(log, "w") as file:
        first = subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, env=environment(**mark),
            stdout=file, stderr=file,
        )  # fmt: skip
    trial = directory / "trials/0000"
    try:
        while not store.list_checkpoints(str(trial)):
            assert first.poll() is None, log.read_text()
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait()
    while marked_processes(mark):  # the jobs of the trials save and exit
        time.sleep(0.05)
    reached = int(store.find_newest(str(trial)).path[-8:])
    assert reached == max(event["step"] for event in events(trial, "step"))

    script = project / "run_scripts/search.sh"
    second = run_command([script, "--resume"], environment(OUTPUT_DIR=str(directory)), 500)
    assert second.returncode == 0, second.stderr
    trials = load_study(str(directory)).trials
    assert [each.state for each in trials] == [TrialState.COMPLETE, TrialState.PRUNED]
    best = trials[0].value
    # The first run was resumed from its checkpoint, and the bad run was saved.
    steps = [event["step"] for event in events(trial, "step")]
    assert steps == list(range(1, steps[-1] + 1)) and len(values(trial)) == 3
    assert reached < steps[-1] and len(events(trial, "start")) == 2
    pruned = directory / "trials/0001"
    assert 1 <= len(values(pruned)) < 3 and store.find_newest(str(pruned))
    assert best == min(values(trial))
    assert f"best: {trial}, valid perplexity {best:.2f}" in second.stderr
    assert f"Best: trial 0, valid perplexity {best:.2f}." in second.stdout
    assert all(events(run, "test") == [] for run in (trial, pruned))
    html = (directory / "report.html").read_text()
    assert f"<pre>python -m lm.train --config {directory}/best.py" in html
    assert f"--data_path={corpora}" in html and "trial 0000: learning_rate" in html

    # With best.py, one rank reaches the perplexities of two ranks.
    flags = ("--config", directory / "best.py", "--data_path", corpora, "--test_on", "none")
    train(tmp_path / "again", *flags)
    assert values(tmp_path / "again") == values(trial)
    assert events(tmp_path / "again", "test") == []


@pytest.mark.parametrize("flag", ["--output_dir=searches/a", "--config"])
def test_the_script_rejects_flags_that_are_environment_variables(project, flag):
    result = run_command([project / "run_scripts/search.sh", flag, "mine.py"], environment(), 30)
    assert result.returncode == 2 and "set OUTPUT_DIR and CONFIG" in result.stderr
