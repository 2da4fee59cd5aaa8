"""The driver and the jobs of its trials."""

import itertools
import os
import signal
import subprocess

import pytest

from lm.config_file import load_config_file
from lm.distributed.cores import claim_cores
from lm.errors import RunError, Stopped, UserError
from lm.files import locked
from lm.report.search_page import search_text
from lm.search.results import progress_line
from lm.search.study import FAILURE, load_study
from tests.unit.search.searches import COMPLETE, FAIL, PRUNED, space, starts, states, trials, values

WAIT = "while true; do sleep 0.05; done"

pytestmark = pytest.mark.timeout(60)


def report(search):
    directory = str(search.directory)
    return search_text(directory, load_study(directory))


def test_the_best_trial_is_found_and_written(search):
    study = search()
    assert states(study) == [COMPLETE] * 3 and values(study) == [1000, 500, 250]
    best = load_config_file(str(search.directory / "best.py")).config
    assert best.learning_rate == 4 and best.num_epochs == 2
    assert "\n3 of 3 trials: 3 finished.\n" in report(search)


def test_perplexities_of_characters_have_four_digits(search, caplog):
    caplog.set_level("INFO")
    search(space("1|2"), body='value() { echo "\\"valid_perplexity\\": 2.479${rate%.*}"; }')
    best = (search.directory / "best.py").read_text()
    for text in (best, caplog.text, report(search)):
        assert "perplexity 2.4791" in text
    assert "| 2.4792 |" in report(search)


PART = (
    r'event "\"epoch\", \"step\": 3, \"epoch\": 1, \"epochs\": 0.25, $(value),'
    r' \"epoch_seconds\": 1, \"tokens_per_second\": 1"; end finished; exit'
)


def test_a_part_of_an_epoch_is_not_reported_as_an_epoch(search):
    study = search(body=PART)
    assert values(study) == [1000, 500, 250]
    assert all(trial.intermediate_values == {} for trial in trials(study))
    line = "trial 2 finished after 0.25 epochs: valid perplexity 250.00 (learning_rate 4)"
    assert progress_line(trials(study)[2]) == line
    assert report(search).count("|   0.25 |") == 3


def test_the_best_validation_may_be_within_an_epoch(search):
    within = r'event "\"validation\", \"step\": 1, \"epoch\": 1, \"valid_perplexity\": $1"'
    body = f"within() {{ {within}; }}; [[ $rate != 2.0 ]] || within 7; epoch 1; within 600"
    study = search(space("1|2|4"), body=body)
    assert values(study) == [600, 7, 250]
    assert trials(study)[1].intermediate_values == {1: 500, 2: 500}


def test_a_trial_has_no_flags_that_its_optimizer_ignores(search):
    search("--space=learning_rate=2, optimizer=sgd|adam", "--adam_beta1=0.5")
    commands = [path.read_text() for path in sorted(search.directory.glob("trials/*/console.txt"))]
    assert ["--adam_beta1=0.5" in command for command in commands] == [False, True]


@pytest.mark.parametrize(
    "sampler, pruner", [("tpe", "none"), ("random", "hyperband"), ("tpe", "median")]
)
def test_samplers_and_pruners_work_on_ranges(search, sampler, pruner):
    study = search(space("1:8:log"), f"--sampler={sampler}", f"--pruner={pruner}", "--trials=4")
    rates = {trial.params["learning_rate"] for trial in trials(study)}
    assert len(rates) == 4 and all(1 <= rate <= 8 for rate in rates)
    assert all(state in (COMPLETE, PRUNED) for state in states(study))


def test_the_same_values_are_trained_once(search):
    study = search(space("1|2"), "--sampler=random", "--trials=5")
    rates = [trial.params["learning_rate"] for trial in trials(study)]
    assert set(rates) == {1, 2} and values(study) == [1000 / rate for rate in rates]
    assert len(list((search.directory / "trials").iterdir())) == 2


def test_an_interrupted_trial_continues_although_a_later_trial_has_the_same_values(search):
    wait = "while [[ ! -e ../../best.py ]]; do sleep 0.01; done"
    body = f"[[ $PWD != */0000 || -e failed ]] || {{ {wait}; touch failed; fail broken; }}"
    flags = "--sampler=random", "--search_seed=1", "--trials=2", "--parallel_trials=2"
    assert values(search(space("1|2"), *flags, body=body)) == [1000, 1000]
    assert [starts(search, number) for number in (0, 1)] == [["start"] * 2, ["start"]]


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


def test_trials_with_invalid_values_fail_and_count_as_bad(search, tmp_path):
    (tmp_path / "mine.py").write_text(CHECKED)
    space = "--space=learning_rate=1|2, init_scale=1|2"
    study = search(f"--config={tmp_path / 'mine.py'}", space)
    assert states(study) == [PRUNED, COMPLETE, COMPLETE, PRUNED]
    assert "\n4 of 4 trials: 2 finished, 2 failed.\n" in report(search)
    assert trials(study)[0].user_attrs[FAILURE] == "Checked: ValueError: equal"


def test_only_parallel_trials_run_at_a_time(search):
    at_a_time = min(2, claim_cores())
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


def test_a_trial_is_not_pruned_after_its_last_step(search):
    """Then, a run ignores the signal."""
    only_first_improves = "epoch 1; [[ $rate == 4.5 ]] || rate=5.0; trap '' USR2; epoch 2"
    body = f"{only_first_improves}; sleep 0.5; end finished; exit"
    study = search(space("4|4.5"), body=body)
    assert states(study) == [COMPLETE] * 2 and values(study) == [200, 250]


def test_a_bad_trial_that_cannot_save_is_retried(search, caplog):
    is_first = "[[ $rate == 1.0 && $(wc -l <starts) == 1 ]]"
    body = f"if {is_first}; then trap 'fail unsaved' USR2; epoch 1; {WAIT}; fi"
    study = search(space("4|1"), body=body)
    assert "trial 1 failed (unsaved); retrying, 1 of 2" in caplog.text
    assert FAIL not in states(study)
    # The driver stops the second job immediately, perhaps before it starts to train.
    assert starts(search, 1)[:2] in (["start", "start"], ["start"])


@pytest.mark.parametrize(
    "failure, num_starts, reason, state",
    [
        # The sampler learns from a failure that the values of the trial caused.
        ("fail 'the loss is nan at step 3' 2", 1, "the loss is nan at step 3", PRUNED),
        ("echo lm: error: no corpus; exit 2", 1, "no corpus", PRUNED),
        ("kill -9 $$", 3, "exit code -9; see the trial's console.txt", FAIL),
        ("exit 0", 3, "exit code 0; see the trial's console.txt", FAIL),
        ("(($(wc -l <starts) > 1)) || fail once", 2, None, COMPLETE),
        # The second job finds a finished run.
        ("(($(wc -l <starts) == 1)) || exit 0; epoch 1; epoch 2; kill -9 $$", 2, None, COMPLETE),
    ],
)
def test_a_failed_trial_is_retried_and_has_a_reason(search, failure, num_starts, reason, state):
    study = search(space("2|4"), body=f"[[ $rate != 2.0 ]] || {{ {failure}; }}")
    assert states(study) == [state, COMPLETE]
    outcome = f"trial 0 {'failed' if reason else 'finished'} after"
    assert progress_line(trials(study)[0]).startswith(outcome)
    assert len(starts(search, 0)) == num_starts
    assert trials(study)[0].user_attrs.get(FAILURE) == reason
    assert reason is None or reason in report(search)


def test_after_ctrl_c_trials_are_saved_and_the_next_driver_resumes_them(search):
    started, turns = search.directory / "trials/0000/starts", itertools.count()

    def press():
        if started.exists() and next(turns) == 0:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped, match="--resume") as caught:
        search(body=WAIT, on_tick=press)
    assert caught.value.exit_code == 130
    assert starts(search, 0)[1:] == ["saved"]
    assert states(search()) == [COMPLETE] * 3
    assert starts(search, 0)[-1] == "start"
    assert len(list((search.directory / "trials").iterdir())) == 3


@pytest.mark.parametrize(
    "failure, reason, error",
    [
        ("fail 'no corpus' 2", "no corpus", UserError),
        ('fail "cannot write $PWD/x" 2', "cannot write .*/x", UserError),
        ("kill -9 $$", "exit code -9; see the trial's console.txt", RunError),
    ],
)
def test_three_equal_failures_end_the_search(search, failure, reason, error):
    state = PRUNED if error is UserError else FAIL
    gone, rates = "../../../gone", space("1|2|4|8|9")
    body = f"[[ ! -e {gone} ]] || {{ {failure}; }}; [[ $rate != 1.0 ]] || touch {gone}"
    with pytest.raises(error, match=f"3 trials failed with the same error: {reason}; .*resume"):
        search(rates, body=body)
    assert states(search(rates)) == [COMPLETE, state, state, COMPLETE, COMPLETE]


def test_a_repeated_trial_does_not_reset_the_count_of_equal_failures(search):
    flags = "--sampler=random", "--search_seed=9", "--trials=6"  # rates 1, 2, 2, 1, 1, 2
    with pytest.raises(UserError, match="3 trials failed with the same error: no corpus"):
        search(space("1|2"), *flags, body="[[ $rate = 1.0 ]] || fail 'no corpus' 2")


def test_a_search_without_a_result_is_not_queued_again(search):
    with pytest.raises(UserError, match="no trial has finished") as caught:
        search(space("1|2"), body="fail 'no corpus' 2")
    assert caught.value.exit_code == 2


def test_a_search_on_hosts_is_resumed_on_the_hosts_of_the_next_job(search):
    lock = search.directory / "trials/0000/.lock"  # The job does not start.
    lock.parent.mkdir(parents=True)
    message = r"; on the hosts of the new job, resume with: python .* --resume --hosts HOSTS$"
    with locked(str(lock)), pytest.raises(Stopped, match=message):
        search("--hosts=node1:1", on_tick=lambda: os.kill(os.getpid(), signal.SIGINT))


def test_the_console_of_a_trial_does_not_follow_a_link(search):
    console = search.directory / "trials/0000/console.txt"
    console.parent.mkdir(parents=True)
    console.symlink_to("victim")
    with pytest.raises(RunError, match=r"console.txt is a link; replace it by its target"):
        search(space("1"))
    assert not (console.parent / "victim").exists()


def test_a_trial_waits_for_its_previous_job(search, caplog):
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

    assert states(search(on_tick=release)) == [COMPLETE] * 3
    assert starts(search, 0) == ["left", "start"] and holder.wait() == 0
    message = f"waiting for the job that is using {lock.parent}. If its host has died, an NFS"
    assert caplog.text.count(message) == 1 and f": remove {lock}\n" in caplog.text
