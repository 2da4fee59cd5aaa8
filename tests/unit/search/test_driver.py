"""The driver, its study and its processes. A shell script replaces lm.train."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
from optuna.trial import TrialState

from lm.config_file import load_config_file
from lm.distributed.devices import count_cores
from lm.errors import RunError, Stopped, UserError
from lm.search import driver
from lm.search.driver import Driver
from lm.search.options import load_settings
from lm.search.results import load_search, search_text
from lm.search.study import FAILURE, open_search

# The perplexity of each epoch is 1000 / learning rate, unless the body of the test differs.
TRAINER = """#!/bin/bash
rate=1.0  # of the config
while [[ $1 != --output_dir ]]; do
    [[ $1 != --learning_rate=* ]] || rate=${{1#*=}}
    shift
done
cd $2
event() {{ echo "{{\\"event\\": $1}}" >>metrics.jsonl; }}
end() {{ event "\\"end\\", \\"outcome\\": \\"$1\\", \\"reason\\": \\"$2\\""; }}
value() {{ echo "\\"valid_perplexity\\": $((1000 / ${{rate%.*}}))"; }}
epoch() {{ event "\\"epoch\\", \\"epoch\\": $1, $(value)"; }}
fail() {{ end failed "$1"; exit ${{2:-1}}; }}
trap 'echo saved >>starts; end stopped; exit 143' USR2
echo start >>starts
{body}
epoch 1; epoch 2; end finished
"""
WAIT = "while true; do sleep 0.05; done"
COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def search(tmp_path, corpora, monkeypatch):
    """Return a function that runs a search of learning rates, with code for the trainer."""
    monkeypatch.setattr(driver, "_TICK_SECONDS", 0.01)
    trainer = tmp_path / "python"

    def run(*flags, body="", stop=lambda: 0):
        trainer.write_text(TRAINER.format(body=body))
        trainer.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(trainer))
        with contextlib.ExitStack() as stack:
            found = open_search(run.command(*flags), stack)

            class Signals:
                stop = property(lambda self: stop())

            Driver(found, Signals()).run()
        return found.study

    def command(*flags):
        """Return a command line. Later flags replace earlier flags."""
        return [
            "lm.search", "--config=config_test", "--num_epochs=2", "--sampler=grid", "--trials=9",
            "--space=learning_rate=1|2|4", f"--data_path={corpora}",
            f"--output_dir={run.directory}", "--resume", *flags,
        ]  # fmt: skip

    run.command = command
    run.directory = tmp_path / "search"
    return run


def trials(study):
    return study.get_trials(deepcopy=False)


def states(study):
    return [trial.state for trial in trials(study)]


def values(study):
    return [trial.value for trial in trials(study)]


def starts(search, number):
    return (search.directory / f"trials/000{number}/starts").read_text().split()


def space(rates):
    return f"--space=learning_rate={rates}"


def test_the_best_trial_is_found_and_written(search):
    study = search()
    assert states(study) == [COMPLETE] * 3 and values(study) == [1000, 500, 250]
    best = load_config_file(str(search.directory / "best.py")).config
    assert best.learning_rate == 4 and best.num_epochs == 2
    assert "\n3 of 3 trials: 3 finished.\n" in search_text(load_search(str(search.directory)))


def test_a_resumed_search_keeps_its_settings(search, corpora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address, corpus = "https://host/a.tgz", os.path.relpath(corpora)
    flags = [
        "--max_grad_norm=inf", "--warmup_steps=3", f"--data_path={corpus}", "--init_from=a",
        f"--data_url={address}", "--tie_weights", "--notensorboard",
    ]  # fmt: skip
    for _ in range(2):
        assert states(search(*flags)) == [COMPLETE] * 3
    assert starts(search, 0) == ["start"]
    kept = load_settings(str(search.directory)).flags
    paths = {"data_path": str(corpora), "init_from": str(tmp_path / "a"), "data_url": address}
    assert {**paths, "tie_weights": True, "tensorboard": False}.items() <= kept.items()
    search("--trials=2", "--intra_op_threads=1")
    assert load_settings(str(search.directory)).flags["trials"] == 2  # for the next --resume
    for flag, before in {
        "warmup_steps=4": "3", "init_from=/b": f"'{tmp_path}/a'", "keep_checkpoints=4": "None",
        "space=seed=1|2": "'learning_rate=1.2.4'",
    }.items():  # fmt: skip
        with pytest.raises(
            UserError, match=f"cannot resume: {flag.partition('=')[0]} was {before}"
        ):
            search(f"--{flag}")
    with pytest.raises(UserError, match=r"config_transformer.py differs from the config file"):
        search("--config=config_transformer")


@pytest.mark.parametrize(
    "sampler, pruner", [("tpe", "none"), ("random", "hyperband"), ("tpe", "median")]
)
def test_samplers_and_pruners_work_on_ranges(search, sampler, pruner):
    study = search(space("1:8:log"), f"--sampler={sampler}", f"--pruner={pruner}", "--trials=4")
    rates = {trial.params["learning_rate"] for trial in trials(study)}
    assert len(rates) == 4 and all(1 <= rate <= 8 for rate in rates)
    assert all(state in (COMPLETE, PRUNED) for state in states(study))


def test_a_search_cannot_be_resumed_with_another_corpus(search, tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b\n" * 500)
    flags = ["--corpus=files", f"--data_path={tmp_path}"]
    for _ in range(2):
        search(*flags)
    (tmp_path / "valid.txt").write_text("a b b\n" * 500)
    with pytest.raises(UserError, match="cannot resume: the corpus is not the corpus of this"):
        search(*flags)


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--config="], "config"),
        (["--config=config_small", "--data_url=/none.tgz", "--data_path=/none"], "/none"),
        (["--learning_rate=3"], "--learning_rate is in --space too"),
    ],
)
def test_invalid_input_creates_nothing(search, flags, error):
    with pytest.raises(UserError, match=error):
        search(*flags)
    assert not search.directory.exists()


CHECKED = """
import dataclasses
from lm.config import Config

@dataclasses.dataclass(frozen=True)
class Checked(Config):
    def __post_init__(self):
        super().__post_init__()
        if self.learning_rate == self.init_scale:
            raise ValueError("equal")

def get_config():
    return Checked(corpus="embedded", learning_rate=3.0, init_scale=0.5)
"""


def test_trials_with_invalid_values_fail(search, tmp_path):
    (tmp_path / "mine.py").write_text(CHECKED)
    space = "--space=learning_rate=1|2, init_scale=1|2"
    study = search(f"--config={tmp_path / 'mine.py'}", space)
    assert states(study) == [FAIL, COMPLETE, COMPLETE, FAIL]
    assert trials(study)[0].user_attrs[FAILURE] == "Checked: ValueError: equal"


def test_only_parallel_trials_run_at_a_time(search):
    at_a_time = min(2, count_cores())
    meet = f"until (($(grep -c in ../../log) >= {at_a_time})); do sleep 0.05; done"
    body = f"echo in >>../../log; {meet}; echo out >>../../log"
    search(space("1|2|3|4"), f"--parallel_trials={at_a_time}", body=body)
    log = (search.directory / "log").read_text().split()
    running = itertools.accumulate(1 if line == "in" else -1 for line in log)
    assert max(running) == at_a_time and len(log) == 8


@pytest.mark.parametrize(
    "trap, expected",
    [
        ("", ["start", "saved"]),
        # The signal kills a job that has not started to train, with or without mpirun.
        ("trap 'trap - USR2; kill -USR2 $$' USR2;", ["start"]),
        ("trap 'exit 140' USR2;", ["start"]),
    ],
)
def test_a_bad_trial_is_saved_and_pruned(search, trap, expected):
    body = f"if [[ $rate == 1.0 ]]; then {trap} epoch 1; {WAIT}; fi"
    study = search(space("4|1"), body=body)
    assert states(study) == [COMPLETE, PRUNED] and values(study)[1] == 1000
    assert starts(search, 1) == expected


def test_a_bad_trial_that_cannot_save_is_retried(search, caplog):
    is_first = "[[ $rate == 1.0 && $(wc -l <starts) == 1 ]]"
    body = f"if {is_first}; then trap 'fail unsaved' USR2; epoch 1; {WAIT}; fi"
    search(space("4|1"), body=body)
    assert "trial 1 failed (unsaved); retrying, 1 of 2" in caplog.text
    assert starts(search, 1)[:2] == ["start", "start"]


@pytest.mark.parametrize(
    "failure, num_starts, reason",
    [
        ("fail 'the loss is nan at step 3'", 3, "the loss is nan at step 3"),
        ("fail 'batch_size is wrong' 2", 1, "batch_size is wrong"),
        ("echo lm: error: no corpus; exit 2", 1, "no corpus"),
        ("kill -9 $$", 3, "exit code -9; see the trial's console.txt"),
        ("exit 0", 3, "exit code 0; see the trial's console.txt"),
        ("(($(wc -l <starts) > 1)) || fail once", 2, None),
    ],
)
def test_a_failed_trial_is_retried_and_has_a_reason(search, failure, num_starts, reason):
    study = search(space("2|4"), body=f"[[ $rate != 2.0 ]] || {{ {failure}; }}")
    assert states(study) == [FAIL if reason else COMPLETE, COMPLETE]
    assert len(starts(search, 0)) == num_starts
    assert trials(study)[0].user_attrs.get(FAILURE) == reason
    assert reason is None or reason in search_text(load_search(str(search.directory)))


def test_after_ctrl_c_trials_are_saved_and_the_next_driver_resumes_them(search):
    started = search.directory / "trials/0000/starts"
    with pytest.raises(Stopped, match="--resume") as caught:
        search(body=WAIT, stop=lambda: signal.SIGINT if started.exists() else 0)
    assert caught.value.exit_code == 130
    assert starts(search, 0)[1:] in (["saved"], [])  # the signal may kill it before it trains
    assert states(search()) == [COMPLETE] * 3
    assert starts(search, 0)[-1] == "start"
    assert len(list((search.directory / "trials").iterdir())) == 3


@pytest.mark.parametrize(
    "failure, reason",
    [
        ("fail 'no corpus' 2", "no corpus"),
        ('fail "cannot write $PWD/x" 2', "cannot write .*/x"),
        ("kill -9 $$", "exit code -9; see the trial's console.txt"),
    ],
)
def test_three_equal_failures_end_the_search(search, failure, reason):
    gone, rates = "../../../gone", space("1|2|4|8|9")
    body = f"[[ ! -e {gone} ]] || {{ {failure}; }}; [[ $rate != 1.0 ]] || touch {gone}"
    with pytest.raises(RunError, match=f"3 trials failed with the same error: {reason}; .*resume"):
        search(rates, body=body)
    assert states(search(rates)) == [COMPLETE, FAIL, FAIL, COMPLETE, COMPLETE]


def test_a_lost_storage_is_one_line(search):
    lost = r"cannot use the study \(.*\); the running trials are saved"
    with pytest.raises(RunError, match=lost):
        search(body="rm ../../study.db; mkdir ../../study.db")


def test_a_trial_waits_for_its_previous_job(search):
    lock = search.directory / "trials/0000/.lock"
    lock.parent.mkdir(parents=True)
    script = f"echo held; read x; echo left >>{lock.parent}/starts"
    holder = subprocess.Popen(
        ["flock", str(lock), "sh", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout.readline() == "held\n"
    turns = itertools.count()

    def release():
        if next(turns) == 20:
            holder.stdin.close()
        return 0

    assert states(search(stop=release)) == [COMPLETE] * 3
    assert starts(search, 0) == ["left", "start"] and holder.wait() == 0


def test_a_file_has_one_driver_at_a_time(search):
    def start_another():
        with contextlib.ExitStack() as stack, pytest.raises(RunError, match="another driver"):
            open_search(search.command(), stack)
        return 0

    search(stop=start_another)


def test_an_incomplete_search_or_a_newer_version_is_one_line(search, tmp_path):
    search()
    study = (search.directory / "study.db").rename(tmp_path / "elsewhere.db")
    for read in (search, lambda: load_search(str(search.directory))):
        with pytest.raises(UserError, match=r"study.db does not exist"):
            read()
    study.rename(search.directory / "study.db")
    assert states(search()) == [COMPLETE] * 3
    path = search.directory / "search.json"
    settings = json.loads(path.read_text())
    settings["flags"]["spin"] = 1
    path.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="'spin'"):
        search()


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_resumed_search_tries_the_same_values(search, sampler):
    """The search is interrupted before each trial, and after the choice of its values."""
    words = [
        "--space=learning_rate=1:8, keep_prob=0.5:1", f"--sampler={sampler}", "--trials=8",
    ]  # fmt: skip

    def resume(then):
        with contextlib.ExitStack() as stack:
            found = open_search(search.command(*words), stack)
            return then(found)

    def run_all(found, count=8):
        for _ in range(count):
            trial = found.ask()
            found.study.tell(trial, float(trial.number))

    resume(run_all)
    whole = [trial.params for trial in trials(load_search(str(search.directory)).study)]
    search.directory = search.directory.with_name("interrupted")
    for _ in range(8):
        resume(lambda found: found.ask())
        resume(lambda found: run_all(found, 1))
    resumed = [trial.params for trial in trials(load_search(str(search.directory)).study)]
    assert whole == resumed and len({str(params) for params in whole}) >= 6
