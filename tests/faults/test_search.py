"""Searches that lose a driver, and searches on two hosts."""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time

import pytest
from optuna.trial import TrialState

from lm.search.study import load_study
from tests.commands import ROOT, environment, kill_marked, marked_processes, new_mark
from tests.faults.jobs import events
from tests.faults.test_two_hosts import hosts, mpirun_options

__all__ = ["hosts"]

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for hosts"),
]

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "50"))
# A fast replacement for lm.train that trains and resumes.
TRAINER = """#!/bin/bash
while [[ $1 != --output_dir ]]; do
    [[ $1 != --learning_rate=* ]] || rate=${1#*=}
    shift
done
cd $2
exec 9>.lock; flock -n 9 || { echo "lm: error: another job is here"; exit 1; }
echo '{"config": {}, "vocabulary": "", "corpus": {"kind": "", "path": "", "sha256": ""}}' >run.json
end() { echo '{"event": "end", "outcome": "'$1'"}' >>metrics.jsonl; }
trap 'end stopped; exit 143' USR2
for ((epoch = $(grep -c valid metrics.jsonl 2>/dev/null) + 1; epoch <= 5; epoch++)); do
    sleep 0.1
    place='"step": '$epoch', "epoch": '$epoch', "epochs": '$epoch
    facts='"epoch_seconds": 1.0, "tokens_per_second": 1.0, "valid_perplexity": 1'$epoch$rate
    echo '{"event": "epoch", '$place', '$facts'}' >>metrics.jsonl
done
end finished
"""
FLAGS = (
    "--config", "config_test", "--hidden_size", 8, "--num_steps", 5, "--batch_size", 400,
    "--num_epochs", 8, "--pruner", "none", "--checkpoint_every_steps", 150,
    "--space", "learning_rate=0.3:3:log", "--trials", 4, "--resume",
)  # fmt: skip


@pytest.fixture
def drive(corpora, tmp_path):
    """Start drivers of one search; kill their processes when the test ends."""
    marks = []

    def start(*flags, prefix=(), **env):
        marks.append(new_mark())
        command = [
            *prefix, sys.executable, "-m", "lm.search", *FLAGS, "--data_path", corpora,
            "--output_dir", tmp_path / "search", *flags,
        ]  # fmt: skip
        return subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, env=environment(**env, **marks[-1]),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    yield start
    for mark in marks:
        kill_marked(mark)


@pytest.mark.timeout(1800)
def test_a_driver_killed_at_any_moment_does_not_change_the_results(corpora, tmp_path):
    trainer = tmp_path / "python"
    trainer.write_text(TRAINER)
    trainer.chmod(0o755)
    program = (
        f"import runpy, sys; sys.executable = {str(trainer)!r};"
        " runpy.run_module('lm.search', run_name='__main__')"
    )
    mark = new_mark()

    def start(directory):
        command = [
            sys.executable, "-c", program, "--config", "config_test",
            "--space", "learning_rate=0.3:3:log", "--pruner", "none", "--trials", ROUNDS,
            "--data_path", corpora, "--output_dir", tmp_path / directory, "--resume",
        ]  # fmt: skip
        return subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, env=environment(**mark),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def trials(directory):
        found = load_study(str(tmp_path / directory)).trials
        return [(each.state, each.params, each.value) for each in found]

    whole = start("whole")
    assert "best: " in whole.communicate(timeout=600)[0]
    chance, kills = random.Random(os.environ.get("SOAK_SEED")), 0
    try:
        while (driver := start("killed")).poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output = driver.communicate(timeout=chance.uniform(0.5, 4))[0]
                assert "best: " in output, output
                break
            driver.kill()
            driver.wait()
            kills += 1
        assert kills and trials("killed") == trials("whole")
        for number in range(ROUNDS):
            run = tmp_path / f"killed/trials/{number:04d}"
            assert [event["epoch"] for event in events(run, "epoch")] == [1, 2, 3, 4, 5]
        deadline = time.monotonic() + 10
        while marked_processes(mark):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        kill_marked(mark)
    print(f"{kills} kills")


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (shutil.which("ip") and os.path.exists("/usr/sbin/sshd")),
    reason="needs iproute2 and openssh-server",
)
def test_trials_run_on_all_hosts(drive, hosts, tmp_path):
    words = mpirun_options(hosts)
    options = {f"OMPI_MCA_{name}": value for name, value in zip(words[1::3], words[2::3])}

    def search(*flags, path=ROOT):
        both = ("--hosts", "lmhost1:1,lmhost2:1")
        env = {**options, "PYTHONPATH": str(path)}
        driver = drive(*both, *flags, prefix=hosts("run", "lmhost1"), **env)
        output = driver.communicate(timeout=600)[0]
        assert driver.returncode == 0, output

    def machines(number):
        return events(tmp_path / f"search/trials/000{number}", "start")[0]["hosts"]

    search()
    assert {"lmhost1"} < {host for number in range(4) for host in machines(number)}
    # A trial on both hosts has the driver's environment on both.
    mark = "import pathlib, socket; pathlib.Path(__file__).with_name(socket.gethostname()).touch()"
    (tmp_path / "sitecustomize.py").write_text(mark)
    search("--trials", 5, "--ranks_per_trial", 2, path=tmp_path)
    assert machines(4) == ["lmhost1", "lmhost2"] and (tmp_path / "lmhost2").exists()
    trials = load_study(str(tmp_path / "search")).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 5
