"""The driver, its study and its processes; a shell script stands in for the training."""

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys

import optuna
import pytest
from optuna.trial import TrialState

from lm.config_file import load_config_file
from lm.distributed.devices import count_cores
from lm.errors import RunError, Stopped, UserError
from lm.report.search import FAILURES, load_search, summary
from lm.search import driver, prepare
from lm.search.driver import Driver
from lm.search.options import load_settings
from lm.search.prepare import Given
from lm.search.winner import report_winner

# Each epoch of a trial has the perplexity 1000 / learning rate, but where TRAINER says otherwise.
TRAINER = """#!/bin/bash
rate=1.0  # the config's
while [[ $1 != --output_dir ]]; do
    [[ $1 != --learning_rate=* ]] || rate=${{1#*=}}
    shift
done
cd $2
echo start >>starts
trap 'echo saved >>starts; exit 143' USR2
echo '{{"config": {{}}, "vocabulary": "", "corpus": {{"kind": "", "path": "", "sha256": ""}}}}' \
    >run.json
epoch() {{
    local value='"valid_perplexity": '$((1000 / ${{rate%.*}}))
    echo '{{"event": "epoch", "epoch": '"$1, $value}}" >>metrics.jsonl
}}
fail() {{ echo "lm: error: $1"; exit ${{2:-1}}; }}
{body}
epoch 1; epoch 2
"""
pytestmark = pytest.mark.timeout(60)
TRACEBACK = """printf '%s\\n' 'lm: error: Traceback (most recent call last):' '  File' \\
    '    x()' 'ValueError: no such thing' 'detail' >&2; exit 1"""
WAIT = "while true; do sleep 0.05; done"


@pytest.fixture
def search(tmp_path, corpora, monkeypatch):
    """Return a function that runs a search of learning rates with such a trainer."""
    monkeypatch.setattr(driver, "_TICK_SECONDS", 0.01)
    trainer = tmp_path / "python"
    directory = tmp_path / "search"

    def run(
        rates="1|2|4",
        body="",
        stop=lambda: 0,
        config="config_test",
        training=(),
        fields=(),
        **options,
    ):
        trainer.write_text(TRAINER.format(body=body))
        trainer.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(trainer))
        options = {"space": f"learning_rate={rates}", "sampler": "grid", "trials": 9, **options}
        given = Given(
            config,
            {"num_epochs": 2, **dict(fields)},
            options,
            {"data_path": str(corpora), **dict(training)},
        )
        with contextlib.ExitStack() as stack:
            found, study = prepare.prepare(str(run.directory), True, given, stack)

            class Signals:
                stop = property(lambda self: stop())

            run.search, run.driver = found, Driver(str(run.directory), found, study, Signals())
            run.driver.run()
        return study

    run.directory, run.trainer = directory, trainer
    return run


def states(study):
    return [trial.state for trial in study.trials()]


def starts(search, number):
    return (search.directory / f"trials/000{number}/starts").read_text().split()


def test_the_best_is_found_and_written(search, capsys):
    study = search()
    assert states(study) == [TrialState.COMPLETE] * 3
    assert [trial.value for trial in study.trials()] == [1000, 500, 250]
    best = load_config_file(str(search.directory / "best.py")).config
    assert best.learning_rate == 4 and best.num_epochs == 2
    # Again, nothing is left to do; with another space it is another search.
    assert starts(search, 0) == ["start"]
    assert summary(load_search(str(search.directory)))[0] == "3 of 3 trials: 3 finished."
    search(trials=2)
    assert starts(search, 0) == ["start"]
    assert load_settings(str(search.directory)).options.trials == 2  # for the next --resume
    with pytest.raises(UserError, match="cannot resume: space was"):
        search(rates="1|2|8")
    with pytest.raises(UserError, match="this search did not begin with config_transformer"):
        search(config="config_transformer", fields={"num_heads": 4})


@pytest.mark.parametrize(
    "sampler, pruner", [("tpe", "none"), ("cmaes", "hyperband"), ("nsgaii", "median")]
)
def test_samplers_and_pruners_work_on_ranges(search, sampler, pruner):
    study = search(rates="1:8:log", sampler=sampler, pruner=pruner, trials=4)
    rates = {trial.params["learning_rate"] for trial in study.trials()}
    assert len(rates) == 4 and all(1 <= rate <= 8 for rate in rates)
    assert all(state in (TrialState.COMPLETE, TrialState.PRUNED) for state in states(study))


def test_its_own_command_goes_on_with_a_search(search):
    fields = {"max_grad_norm": math.inf, "warmup_steps": 3}
    for _ in range(2):
        assert states(search(fields=fields)) == [TrialState.COMPLETE] * 3
    with pytest.raises(UserError, match=r"cannot resume: warmup_steps was 3 .* and is 4 now"):
        search(fields={"warmup_steps": 4})
    search(fields=fields, training={"keep_checkpoints": 3, "intra_op_threads": 1})  # the default
    for flag in ({"keep_checkpoints": 4}, {"init_from": "/another"}):
        with pytest.raises(UserError, match=f"cannot resume: {next(iter(flag))} was (3|None) "):
            search(fields=fields, training=flag)


def test_trials_of_another_corpus_are_not_compared(search, tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a b\n" * 500)
    fields, training = {"corpus": "files"}, {"data_path": str(tmp_path)}
    search(rates="1|2", fields=fields, training=training)
    search(rates="1|2", fields=fields, training=training)
    (tmp_path / "valid.txt").write_text("a b b\n" * 500)
    with pytest.raises(UserError, match="cannot resume: the corpus is not the one that this"):
        search(rates="1|2", fields=fields, training=training)


@pytest.mark.parametrize(
    "part, older", [("config", "warmup_steps"), ("options", "heartbeat_seconds"), ("run", None)]
)
def test_a_search_of_another_version_goes_on_unless_that_was_newer(search, part, older):
    search()
    path = search.directory / "search.json"
    settings = json.loads(path.read_text())
    settings[part].pop(older, None)
    path.write_text(json.dumps(settings))
    assert states(search(fields={"warmup_steps": 0})) == [TrialState.COMPLETE] * 3
    settings[part]["spin"] = 1
    path.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="spin"):
        search()


def test_the_name_of_its_directory_need_not_be_utf8(search, caplog):
    caplog.set_level("CRITICAL", "lm")  # pytest's workers can hand on no line with it
    search.directory = search.directory / os.fsdecode(b"\xe4")
    assert states(search()) == [TrialState.COMPLETE] * 3
    assert load_search(str(search.directory)).title.endswith("search/\N{REPLACEMENT CHARACTER}")
    console = (search.directory / "trials/0000/console.txt").read_bytes()
    assert b"search/\xe4/trials/0000" in console


@pytest.mark.parametrize("name", ["a?b", "lr{0.1"])
def test_a_directory_whose_name_an_address_cannot_have_is_refused(search, name):
    search.directory = search.directory / name
    with pytest.raises(UserError, match=r"has a [?{], which the address"):
        search()
    assert not search.directory.parent.exists()


def test_a_config_file_may_suggest_anything(search, tmp_path):
    config = tmp_path / "mine.py"
    config.write_text(
        "import dataclasses\nfrom lm.config import Config\n"
        "def get_config():\n    return Config(corpus='embedded', num_layers=1)\n"
        "def suggest(trial, config):\n    exponent = trial.suggest_int('exponent', 1, 2)\n"
        "    return dataclasses.replace(config, learning_rate=2.0**exponent)\n"
    )
    study = search(config=str(config), space=None, sampler="random", trials=3)
    for trial in study.trials():
        assert trial.value == 1000 / 2 ** trial.params["exponent"]
    best = load_config_file(str(search.directory / "best.py")).config
    assert (best.num_layers, best.num_epochs) == (1, 2)


def test_trials_run_at_a_time_and_only_so_many(search):
    at_a_time = min(2, count_cores())
    meet = f"until (($(grep -c in ../../log) >= {at_a_time})); do sleep 0.05; done"
    body = f"echo in >>../../log; {meet}; echo out >>../../log"
    search(rates="1|2|3|4", body=body, parallel_trials=at_a_time)
    log = (search.directory / "log").read_text().split()
    running = itertools.accumulate(1 if line == "in" else -1 for line in log)
    assert max(running) == at_a_time and len(log) == 8


def test_a_bad_trial_is_stopped_where_it_can_go_on(search):
    wait = f"if [[ $rate == 1.0 ]]; then epoch 1; {WAIT}; fi"
    study = search(rates="4|1", body=wait, trials=4)
    assert states(study) == [TrialState.COMPLETE, TrialState.PRUNED]
    assert study.trials()[1].value == 1000 and starts(search, 1) == ["start", "saved"]


def test_a_trial_that_was_about_to_be_pruned_is_not_started_again(search):
    slow_save = "trap 'touch asked; sleep 1; echo saved >>starts; exit 143' USR2"
    body = f"if [[ $rate == 1.0 ]]; then {slow_save}; epoch 1; {WAIT}; fi"
    asked = search.directory / "trials/0001/asked"
    with pytest.raises(Stopped):
        stop = {"stop": lambda: signal.SIGTERM if asked.exists() else 0}
        search(rates="4|1|2", body=body, **stop)
    study = search(rates="4|1|2")
    assert states(study)[:2] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert starts(search, 1) == ["start", "saved"]


@pytest.mark.parametrize("end", ["trap - USR2; kill -USR2 $$", "exit 140"])
def test_a_bad_trial_that_the_signal_kills_before_it_trains_is_pruned(search, end):
    """Alone, and under mpirun."""
    body = f"if [[ $rate == 1.0 ]]; then trap '{end}' USR2; epoch 1; {WAIT}; fi"
    study = search(rates="4|1", body=body, trials=4)
    assert states(study) == [TrialState.COMPLETE, TrialState.PRUNED]
    assert FAILURES not in study.trials()[1].user_attrs and starts(search, 1) == ["start"]


def test_a_bad_trial_that_cannot_save_is_tried_again(search):
    is_first = "[[ $rate == 1.0 && $(wc -l <starts) == 1 ]]"
    cannot_save = "trap 'echo lm: error: no checkpoint; exit 1' USR2"
    body = f"if {is_first}; then {cannot_save}; epoch 1; {WAIT}; fi"
    study = search(rates="4|1", body=body, trials=4)
    assert study.trials()[1].user_attrs[FAILURES] == ["no checkpoint"]
    assert starts(search, 1)[:2] == ["start", "start"]


@pytest.mark.parametrize("then", ["fail 'once'", "epoch 2; exit", f"epoch 2; {WAIT}"])
def test_a_trial_that_another_driver_has_finished_stays_as_it_is(search, then):
    """This one reports, fails, ends and is stopped all the same."""
    begun, finished = (search.directory / f"trials/0000/{name}" for name in ("starts", "finished"))

    def finish_elsewhere():
        if begun.exists() and not finished.exists():
            study = load_search(str(search.directory)).study
            study.tell(0, 7.0)
            finished.touch()
        return signal.SIGTERM if "while" in then and finished.exists() else 0

    wait = "until [[ -e finished ]]; do sleep 0.05; done"
    body = f"if [[ $rate == 2.0 && $(wc -l <starts) == 1 ]]; then {wait}; epoch 1; {then}; fi"
    stopped = pytest.raises(Stopped) if "while" in then else contextlib.nullcontext()
    with stopped:
        search(rates="2|4", body=body, stop=finish_elsewhere)
    trials = load_search(str(search.directory)).study.trials
    assert (trials[0].state, trials[0].value) == (TrialState.COMPLETE, 7)
    assert not trials[0].intermediate_values and FAILURES not in trials[0].user_attrs


def test_a_bad_trial_that_another_driver_has_pruned_stays_as_it_is(search):
    directory = search.directory / "trials/0001"

    def be_the_other_driver():
        study = load_search(str(search.directory)).study
        if not study.trials:
            study.enqueue_trial({"learning_rate": 4})
            study.enqueue_trial({"learning_rate": 1})
            optuna.trial.Trial(study, study.trials[1]._trial_id).report(1000, 1)
        if (directory / "starts").exists() and not (directory / "pruned").exists():
            study.tell(1, state=TrialState.PRUNED)
            (directory / "pruned").touch()
        return 0

    wait = "until [[ -e pruned ]]; do sleep 0.05; done"
    body = f"if [[ $rate == 1.0 ]]; then {wait}; epoch 2; {WAIT}; fi"
    epochs = {"num_epochs": 3}
    study = search(rates="4|1", body=body, stop=be_the_other_driver, fields=epochs, trials=4)
    assert states(study) == [TrialState.COMPLETE, TrialState.PRUNED]
    assert starts(search, 1) == ["start", "saved"]


@pytest.mark.parametrize(
    "failure, num_starts, state, reason",
    [
        ("fail 'the loss is nan at step 3'", 3, TrialState.FAIL, "the loss is nan at step 3"),
        ("fail 'batch_size is wrong' 2", 1, TrialState.FAIL, "batch_size is wrong"),
        ("kill -9 $$", 3, TrialState.FAIL, "exit code -9; see "),
        ("exit 0", 3, TrialState.FAIL, "exit code 0; see "),
        (TRACEBACK, 3, TrialState.FAIL, "ValueError: no such thing"),
        ("(($(wc -l <starts) > 1)) || fail 'once'", 2, TrialState.COMPLETE, "once"),
    ],
)
def test_a_failed_trial_has_its_reason_and_is_tried_again(
    search, failure, num_starts, state, reason
):
    study = search(rates="2|4", body=f"[[ $rate != 2.0 ]] || {{ {failure}; }}")
    assert states(study) == [state, TrialState.COMPLETE]
    assert len(starts(search, 0)) == num_starts
    failures = study.trials()[0].user_attrs[FAILURES]
    assert len(failures) == (3 if num_starts == 3 else 1)
    assert all(each.startswith(reason) for each in failures)


def test_ctrl_c_lets_trials_save_and_the_next_driver_goes_on(search):
    started = search.directory / "trials/0000/starts"
    with pytest.raises(Stopped, match="--resume") as caught:
        search(body=WAIT, stop=lambda: signal.SIGINT if started.exists() else 0)
    assert caught.value.exit_code == 130
    assert starts(search, 0)[1:] in (["saved"], [])  # asked as it began, it may just end
    study = search()
    assert states(study) == [TrialState.COMPLETE] * 3
    assert starts(search, 0)[-1] == "start"


def test_the_winners_test_says_why_it_fails_and_can_be_stopped(search, tmp_path):
    pid = tmp_path / "pid"
    study = search(stop=lambda: signal.SIGTERM if pid.exists() and pid.read_text() else 0)

    def report():
        report_winner(study, search.search, str(search.directory), search.driver.stop_if_asked)

    search.trainer.write_text("#!/bin/bash\necho 'lm: error: no checkpoint' >&2; exit 2")
    with pytest.raises(RunError, match="the best trial could not be tested: no checkpoint"):
        report()
    search.trainer.write_text(f"#!/bin/bash\necho $$ >{pid}; exec sleep 1000")
    with pytest.raises(Stopped, match=r"stopped by SIGTERM; .*--resume") as caught:
        report()
    assert caught.value.exit_code == 143 and "test" not in study.optuna.user_attrs
    assert not os.path.exists(f"/proc/{pid.read_text().strip()}")
    pid.unlink()
    told = "echo \"{'heads': 4}\"; echo '{\"perplexity\": 3.5}'"  # the first by a config file
    search.trainer.write_text(f"#!/bin/bash\n{told}")
    report()
    assert study.optuna.user_attrs["test"]["perplexity"] == 3.5


def test_an_empty_name_is_no_config(search):
    with pytest.raises(UserError, match="unknown config ''"):
        search(config="")


def test_a_full_disk_ends_the_search_not_the_trials(search):
    with pytest.raises(RunError, match=r"No space left on device; make room, then go on with"):
        search(body='fail "cannot save: No space left on device"')
    assert states(search()) == [TrialState.COMPLETE] * 3


def test_a_search_may_go_on_from_another_directory(search, corpora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = "https://host/a.tgz"
    training = {"data_path": os.path.relpath(corpora), "init_from": "a", "data_url": address}
    search(rates="1|2", training=training)
    run = {"data_path": str(corpora), "init_from": str(tmp_path / "a"), "data_url": address}
    assert load_settings(str(search.directory)).run == run


def test_a_corpus_that_is_not_there_costs_no_trial(search, tmp_path):
    training = {"data_url": str(tmp_path / "none.tgz"), "data_path": str(tmp_path)}
    with pytest.raises(UserError, match=r"there is no file .*none\.tgz"):
        search(config="config_small", training=training)
    assert not search.directory.exists()


def test_a_fault_that_meets_all_trials_ends_the_search(search):
    gone = "../../../gone"  # as the corpus, when its file system is
    body = f"[[ ! -e {gone} ]] || fail 'no corpus' 2; [[ $rate != 1.0 ]] || touch {gone}"
    with pytest.raises(RunError, match=r"3 trials have failed alike: no corpus; .*--resume"):
        search(rates="1|2|4|8|9", body=body)
    assert len(list((search.directory / "trials").iterdir())) == 4
    found = search(rates="1|2|4|8|9")
    done, failed = TrialState.COMPLETE, TrialState.FAIL
    assert states(found) == [done, failed, failed, done, done]


def test_reasons_that_name_the_trial_are_alike(search):
    with pytest.raises(RunError, match=r"3 trials have failed alike: cannot write .*trials/000"):
        search(rates="1|2|4|8|9", body='fail "cannot write $PWD/x" 2')


def suggests_until_the_first_job(tmp_path, error):
    config = tmp_path / "mine.py"
    config.write_text(
        "from lm.config import Config\nfrom lm.errors import UserError\ncalls = []\n"
        "def get_config():\n    return Config(corpus='embedded')\n"
        "def suggest(trial, config):\n    calls.append(trial)\n"
        f"    if len(calls) > 20:\n        raise {error}('late')\n"  # after the rehearsals
        "    return config\n"
    )
    return str(config)


def test_a_suggest_that_fails_for_all_trials_ends_the_search(search, tmp_path):
    config = suggests_until_the_first_job(tmp_path, "ValueError")
    late = r"3 trials have failed alike: suggest\(\) failed: ValueError: late; mend that"
    with pytest.raises(RunError, match=late):
        search(config=config, space=None, sampler="random")


def test_values_that_cannot_be_used_cost_their_trial_alone(search, tmp_path):
    config = suggests_until_the_first_job(tmp_path, "UserError")
    study = search(config=config, space=None, sampler="random", trials=5)
    assert states(study) == [TrialState.FAIL] * 5


def test_processes_that_are_killed_have_failed_alike(search):
    with pytest.raises(
        RunError, match=r"3 trials have failed alike: exit code -9; see the trial's"
    ):
        search(rates="1|2|4|8|9", body="kill -9 $$")


def test_a_storage_that_is_gone_is_one_line(search):
    remove = "rm ../../study.db; mkdir ../../study.db"
    with pytest.raises(RunError, match=r"the study cannot be used: .*; the running trials have"):
        search(body=remove)


def test_a_trial_waits_for_what_is_left_of_its_last_job(search, tmp_path):
    lock = search.directory / "trials/0000/.lock"
    lock.parent.mkdir(parents=True)
    script = f"echo held; read x; echo left >>{lock.parent}/starts"
    holder = subprocess.Popen(
        ["flock", str(lock), "sh", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout.readline() == "held\n"
    turns = itertools.count()

    def release_at_last():
        if next(turns) == 20:
            holder.stdin.close()
        return 0

    assert states(search(stop=release_at_last)) == [TrialState.COMPLETE] * 3
    assert starts(search, 0) == ["left", "start"] and holder.wait() == 0


def test_one_driver_at_a_time_on_a_file(search):
    def second_one():
        given = Given(None, {}, {}, {})
        with contextlib.ExitStack() as stack, pytest.raises(RunError, match="another driver"):
            prepare.prepare(str(search.directory), True, given, stack)
        return 0

    search(stop=second_one)


def test_a_storage_without_the_study_is_refused_and_forgotten(search, tmp_path):
    pytest.importorskip("psycopg2", reason="needs psycopg2-binary (setup.sh --dev)")
    search(rates="1|2")
    with pytest.raises(RunError, match=r"the study cannot be used: .* refused"):
        search(rates="1|2", storage="postgresql://nobody@127.0.0.1:9/x")
    assert load_settings(str(search.directory)).options.storage is None
    study = (search.directory / "study.db").rename(tmp_path / "elsewhere.db")
    with pytest.raises(UserError, match=r"study\.db does not have the study test-.*--storage"):
        search(rates="1|2")
    with pytest.raises(UserError, match=r"study test-.*: no trial has begun"):
        load_search(str(search.directory))
    study.rename(search.directory / "study.db")
    assert states(search(rates="1|2")) == [TrialState.COMPLETE] * 2
