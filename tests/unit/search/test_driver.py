"""The driver, its study and its processes. A shell script replaces lm.train."""

import contextlib
import itertools
import json
import math
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
from lm.search.results import load_search, search_text, summary
from lm.search.study import FAILURE, Given, open_search, runs

# The perplexity of each epoch is 1000 / learning rate, unless the body of the test differs.
TRAINER = """#!/bin/bash
rate=1.0  # of the config
while [[ $1 != --output_dir ]]; do
    [[ $1 != --learning_rate=* ]] || rate=${{1#*=}}
    [[ $1 != --test_on ]] || test_on=$2
    shift
done
cd $2
event() {{ echo "{{\\"event\\": $1}}" >>metrics.jsonl; }}
end() {{ event "\\"end\\", \\"outcome\\": \\"$1\\", \\"reason\\": \\"$2\\""; }}
value() {{ echo "\\"valid_perplexity\\": $((1000 / ${{rate%.*}}))"; }}
epoch() {{ event "\\"epoch\\", \\"epoch\\": $1, $(value)"; }}
fail() {{ end failed "$1"; exit ${{2:-1}}; }}
trap 'echo saved >>starts; end stopped; exit 143' USR2
if [[ $test_on == best ]]; then
    {test}
    event '"test", "test_perplexity": 3.5'; end finished; exit
fi
echo start >>starts
{body}
epoch 1; epoch 2; end finished
"""
WAIT = "while true; do sleep 0.05; done"
COMPLETE, PRUNED, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def search(tmp_path, corpora, monkeypatch):
    """Return a function that runs a search of learning rates with a given trainer."""
    monkeypatch.setattr(driver, "_TICK_SECONDS", 0.01)
    trainer = tmp_path / "python"

    def run(
        rates="1|2|4",
        body="",
        test="",
        stop=lambda: 0,
        config="config_test",
        training=(),
        fields=(),
        **options,
    ):
        trainer.write_text(TRAINER.format(body=body, test=test))
        trainer.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(trainer))
        options = {"space": f"learning_rate={rates}", "sampler": "grid", "trials": 9, **options}
        training = {"data_path": str(corpora), **dict(training)}
        given = Given(config, {"num_epochs": 2, **dict(fields)}, options, training)
        with contextlib.ExitStack() as stack:
            found = open_search(str(run.directory), True, given, stack)

            class Signals:
                stop = property(lambda self: stop())

            Driver(found, Signals()).run()
        return found.study

    run.directory = tmp_path / "search"
    return run


def states(study):
    return [trial.state for trial in runs(study)]


def starts(search, number):
    return (search.directory / f"trials/000{number}/starts").read_text().split()


def test_the_best_trial_is_found_and_written(search):
    study = search()
    assert states(study) == [COMPLETE] * 3
    assert [trial.value for trial in runs(study)] == [1000, 500, 250]
    best = load_config_file(str(search.directory / "best.py")).config
    assert best.learning_rate == 4 and best.num_epochs == 2
    assert summary(load_search(str(search.directory)))[0] == "3 of 3 trials: 3 finished."
    # A second driver does not repeat the trials. A different space needs a new search.
    search(trials=2)
    assert starts(search, 0) == ["start"]
    assert load_settings(str(search.directory)).options.trials == 2  # for the next --resume
    with pytest.raises(UserError, match="cannot resume: space was"):
        search(rates="1|2|8")
    with pytest.raises(UserError, match="config_transformer differs from the config file"):
        search(config="config_transformer", fields={"num_heads": 4})


@pytest.mark.parametrize(
    "sampler, pruner", [("tpe", "none"), ("cmaes", "hyperband"), ("nsgaii", "median")]
)
def test_samplers_and_pruners_work_on_ranges(search, sampler, pruner):
    study = search(rates="1:8:log", sampler=sampler, pruner=pruner, trials=4)
    rates = {trial.params["learning_rate"] for trial in runs(study)}
    assert len(rates) == 4 and all(1 <= rate <= 8 for rate in rates)
    assert all(state in (COMPLETE, PRUNED) for state in states(study))


def test_the_original_command_resumes_a_search(search):
    fields = {"max_grad_norm": math.inf, "warmup_steps": 3}
    for _ in range(2):
        assert states(search(fields=fields)) == [COMPLETE] * 3
    with pytest.raises(UserError, match=r"cannot resume: warmup_steps was 3 .* and is 4 now"):
        search(fields={"warmup_steps": 4})
    search(fields=fields, training={"keep_checkpoints": 3, "intra_op_threads": 1})
    for flag in ({"keep_checkpoints": 4}, {"init_from": "/another"}):
        with pytest.raises(UserError, match=f"cannot resume: {next(iter(flag))} was (3|None) "):
            search(fields=fields, training=flag)


def test_a_search_cannot_be_resumed_with_another_corpus(search, tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b\n" * 500)
    fields, training = {"corpus": "files"}, {"data_path": str(tmp_path)}
    for _ in range(2):
        search(rates="1|2", fields=fields, training=training)
    (tmp_path / "valid.txt").write_text("a b b\n" * 500)
    with pytest.raises(UserError, match="cannot resume: the corpus is not the corpus of this"):
        search(rates="1|2", fields=fields, training=training)


@pytest.mark.parametrize("part", ["config", "options", "run"])
def test_a_search_of_a_newer_version_is_rejected(search, part):
    search()
    path = search.directory / "search.json"
    settings = json.loads(path.read_text())
    settings[part]["spin"] = 1
    path.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="unknown field spin"):
        search()


def test_the_name_of_the_directory_may_not_be_utf8(search, caplog):
    caplog.set_level("CRITICAL", "lm")  # pytest's workers cannot forward this name
    search.directory = search.directory / os.fsdecode(b"\xe4")
    assert states(search()) == [COMPLETE] * 3
    assert load_search(str(search.directory)).title.endswith("search/\N{REPLACEMENT CHARACTER}")
    console = (search.directory / "trials/0000/console.txt").read_bytes()
    assert b"search/\xe4/trials/0000" in console


@pytest.mark.parametrize(
    "name, options, error",
    [
        ("a", {"config": ""}, "cannot read config ''"),
        (
            "a",
            {"config": "config_small", "training": {"data_url": "/none.tgz", "data_path": "/none"}},
            r"/none",
        ),
    ],
)
def test_invalid_input_creates_nothing(search, name, options, error):
    search.directory = search.directory / name
    with pytest.raises(UserError, match=error):
        search(**options)
    assert not search.directory.parent.exists()


def test_a_config_file_may_suggest_any_config(search, tmp_path):
    config = tmp_path / "mine.py"
    config.write_text(
        "import dataclasses\nfrom lm.config import Config\n"
        "def get_config():\n    return Config(corpus='embedded', num_layers=1)\n"
        "def suggest(trial, config):\n    exponent = trial.suggest_int('exponent', 1, 2)\n"
        "    return dataclasses.replace(config, learning_rate=2.0**exponent)\n"
    )
    study = search(config=str(config), space=None, sampler="random", trials=3)
    for trial in runs(study):
        assert trial.value == 1000 / 2 ** trial.params["exponent"]
    best = load_config_file(str(search.directory / "best.py")).config
    assert (best.num_layers, best.num_epochs) == (1, 2)


def test_only_parallel_trials_run_at_a_time(search):
    at_a_time = min(2, count_cores())
    meet = f"until (($(grep -c in ../../log) >= {at_a_time})); do sleep 0.05; done"
    body = f"echo in >>../../log; {meet}; echo out >>../../log"
    search(rates="1|2|3|4", body=body, parallel_trials=at_a_time)
    log = (search.directory / "log").read_text().split()
    running = itertools.accumulate(1 if line == "in" else -1 for line in log)
    assert max(running) == at_a_time and len(log) == 8


def test_a_bad_trial_is_saved_and_pruned(search):
    body = f"if [[ $rate == 1.0 ]]; then epoch 1; {WAIT}; fi"
    study = search(rates="4|1", body=body, trials=4)
    assert states(study) == [COMPLETE, PRUNED]
    assert runs(study)[1].value == 1000 and starts(search, 1) == ["start", "saved"]


@pytest.mark.parametrize("end", ["trap - USR2; kill -USR2 $$", "exit 140"])
def test_a_bad_trial_that_the_signal_kills_is_pruned(search, end):
    """The signal kills a job that has not started to train, with or without mpirun."""
    body = f"if [[ $rate == 1.0 ]]; then trap '{end}' USR2; epoch 1; {WAIT}; fi"
    study = search(rates="4|1", body=body, trials=4)
    assert states(study) == [COMPLETE, PRUNED]
    assert starts(search, 1) == ["start"]


def test_a_bad_trial_that_cannot_save_is_retried(search, caplog):
    is_first = "[[ $rate == 1.0 && $(wc -l <starts) == 1 ]]"
    body = f"if {is_first}; then trap 'fail unsaved' USR2; epoch 1; {WAIT}; fi"
    search(rates="4|1", body=body, trials=4)
    assert "trial 1 failed (unsaved); retrying, 1 of 2" in caplog.text
    assert starts(search, 1)[:2] == ["start", "start"]


@pytest.mark.parametrize("then", ["fail once", "epoch 2; end finished; exit", f"epoch 2; {WAIT}"])
def test_a_trial_that_another_driver_finished_is_not_changed(search, then):
    begun, finished = (search.directory / f"trials/0000/{name}" for name in ("starts", "finished"))

    def finish_elsewhere():
        if begun.exists() and not finished.exists():
            load_search(str(search.directory)).study.tell(0, 7.0)
            finished.touch()
        return 0

    wait = "until [[ -e finished ]]; do sleep 0.05; done"
    body = f"if [[ $rate == 2.0 && $(wc -l <starts) == 1 ]]; then {wait}; epoch 1; {then}; fi"
    study = search(rates="2|4", body=body, stop=finish_elsewhere)
    assert [trial.value for trial in runs(study)] == [7, 250]
    assert not runs(study)[0].intermediate_values and FAILURE not in runs(study)[0].user_attrs


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
    study = search(rates="2|4", body=f"[[ $rate != 2.0 ]] || {{ {failure}; }}")
    assert states(study) == [FAIL if reason else COMPLETE, COMPLETE]
    assert len(starts(search, 0)) == num_starts
    assert runs(study)[0].user_attrs.get(FAILURE) == reason
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


def test_the_test_of_the_best_trial_reports_failures_and_can_be_stopped(search):
    with pytest.raises(
        RunError, match=r"cannot test the best trial \(no checkpoint\); resume with"
    ):
        search(rates="1|2", test="fail 'no checkpoint' 2")
    testing = search.directory / "trials/0001/testing"
    with pytest.raises(Stopped, match=r"stopped by SIGTERM\. .*--resume") as caught:
        search(
            rates="1|2", test=f"touch testing; {WAIT}",
            stop=lambda: signal.SIGTERM if testing.exists() else 0,
        )  # fmt: skip
    assert caught.value.exit_code == 143
    assert search(rates="1|2").user_attrs["test"] == {"trial": 1, "perplexity": 3.5}
    # The search keeps the result.
    search(rates="1|2", test="fail again")


def test_a_full_disk_ends_the_search_but_not_the_trials(search):
    with pytest.raises(RunError, match=r"No space left on device\); free some space, then resume"):
        search(body='fail "cannot save: No space left on device"')
    assert states(search()) == [COMPLETE] * 3


def test_a_search_may_be_resumed_from_another_directory(search, corpora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = "https://host/a.tgz"
    training = {"data_path": os.path.relpath(corpora), "init_from": "a", "data_url": address}
    search(rates="1|2", training=training)
    run = {"data_path": str(corpora), "init_from": str(tmp_path / "a"), "data_url": address}
    assert load_settings(str(search.directory)).run == run


@pytest.mark.parametrize(
    "failure, reason",
    [
        ("fail 'no corpus' 2", "no corpus"),
        ('fail "cannot write $PWD/x" 2', "cannot write .*trials/0003/x"),
        ("kill -9 $$", "exit code -9; see the trial's console.txt"),
    ],
)
def test_three_equal_failures_end_the_search(search, failure, reason):
    gone = "../../../gone"
    body = f"[[ ! -e {gone} ]] || {{ {failure}; }}; [[ $rate != 1.0 ]] || touch {gone}"
    with pytest.raises(RunError, match=f"3 trials failed with the same error: {reason}; .*resume"):
        search(rates="1|2|4|8|9", body=body)
    assert states(search(rates="1|2|4|8|9")) == [COMPLETE, FAIL, FAIL, COMPLETE, COMPLETE]


@pytest.mark.parametrize("error", ["ValueError", "UserError"])
def test_a_suggest_that_fails_ends_the_search_but_invalid_values_do_not(search, tmp_path, error):
    config = tmp_path / "mine.py"
    config.write_text(
        "from lm.config import Config\nfrom lm.errors import UserError\ncalls = []\n"
        "def get_config():\n    return Config(corpus='embedded')\n"
        "def suggest(trial, config):\n    calls.append(trial)\n"
        f"    if len(calls) > 40:\n        raise {error}('late')\n"  # after two rehearsals
        "    return config\n"
    )
    options = {"config": str(config), "space": None, "sampler": "random", "trials": 5}
    if error == "UserError":
        with pytest.raises(RunError, match="no trial has finished"):
            search(**options)
        assert states(load_search(str(search.directory)).study) == [FAIL] * 5
    else:
        late = r"3 trials failed with the same error: suggest\(\) failed: ValueError: late"
        with pytest.raises(RunError, match=late):
            search(**options)


@pytest.mark.parametrize("parallel_trials", [1, min(2, count_cores())])
def test_a_lost_storage_is_one_line(search, parallel_trials):
    with pytest.raises(
        RunError, match=r"cannot use the study \(.*\); the running trials are saved"
    ):
        search(body="rm ../../study.db; mkdir ../../study.db", parallel_trials=parallel_trials)


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
        given = Given(None, {}, {}, {})
        with contextlib.ExitStack() as stack, pytest.raises(RunError, match="another driver"):
            open_search(str(search.directory), True, given, stack)
        return 0

    search(stop=start_another)


def test_a_storage_without_the_study_is_rejected_and_not_kept(search, tmp_path):
    pytest.importorskip("psycopg2", reason="needs psycopg2-binary (setup.sh --dev)")
    search(rates="1|2")
    with pytest.raises(RunError, match=r"cannot use the study \(.* refused"):
        search(rates="1|2", storage="postgresql://nobody@127.0.0.1:9/x")
    assert load_settings(str(search.directory)).options.storage is None
    study = (search.directory / "study.db").rename(tmp_path / "elsewhere.db")
    with pytest.raises(UserError, match=r"does not contain the study test-.*--storage"):
        search(rates="1|2")
    with pytest.raises(UserError, match=r"does not contain the study test-"):
        load_search(str(search.directory))
    study.rename(search.directory / "study.db")
    assert states(search(rates="1|2")) == [COMPLETE] * 2
