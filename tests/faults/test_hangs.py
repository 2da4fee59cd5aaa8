"""If a rank dies, stops or fails, the other ranks end soon and name this rank."""

import os
import re
import signal
import socket
import time

import pytest

from tests import fork_server
from tests.commands import environment, mpirun, one_error, run_command, train_here
from tests.faults.jobs import config_flags, events, last_step, run

LONG = ("--hidden_size", 8, "--num_epochs", 200, "--noeval")


def test_the_only_rank_of_an_mpirun_ends_with_it(start, tmp_path):
    job = start(tmp_path, *LONG, launcher=mpirun(1))
    job.wait_for_step(10)
    job.process.kill()
    assert job.ends()[0] == -signal.SIGKILL


def test_a_disk_that_never_answers_ends_the_job(start, tmp_path):
    flags = (*LONG, "--step_timeout_seconds", 3)
    job = start(tmp_path, *flags, num_ranks=2, fault="slow_disk:600", forked=True)
    job.wait_for_step(10)
    job.process.send_signal(signal.SIGUSR2)
    code, output = job.finish(timeout=3 + 10)
    # The clock ticks once a second.
    where = r"no progress for [34] s in the writing of a checkpoint \(--step_timeout_seconds\)"
    assert code == 1
    assert re.search(f"rank 0 on {socket.gethostname()}: {where}", output), output


def test_a_slow_disk_may_load_a_checkpoint_longer_than_the_timeout(start, tmp_path):
    flags = (*LONG[:-1], "--noeval", "--step_timeout_seconds", 3)
    run(start, tmp_path, *flags, "--max_steps", 2)
    resume = (*flags, "--max_steps", 3, "--resume")
    run(start, tmp_path, *resume, num_ranks=2, fault="slow_load:6")
    assert last_step(tmp_path) == 3


def test_a_stopped_rank_is_named_and_ends_the_job(start, tmp_path):
    flags = (*LONG, "--step_timeout_seconds", 3)
    job = start(tmp_path, *flags, num_ranks=2, fault="stop:1:30", forked=True)
    job.wait_for_step(29)
    code, output = job.finish(timeout=3 + 10)
    assert code == 1
    host = socket.gethostname()
    assert re.search(
        f"rank 0 on {host}: no progress for [34] s in step 30, waiting for rank 1 on {host}, which"
        " is stopped or gone", output,
    )  # fmt: skip
    (end,) = events(tmp_path, "end")
    assert end["outcome"] == "failed" and "in step 30, waiting for rank 1" in end["reason"]


def test_a_rank_that_is_stopped_before_the_ranks_are_connected_ends_the_job(start, tmp_path):
    job = start(tmp_path, *LONG, num_ranks=2, fault="stop_at_start:1:4", forked=True)
    code, output = job.finish(timeout=60)
    assert code == 1
    assert f"rank 0 on {socket.gethostname()}: the ranks are not connected after 4 s" in output


@pytest.mark.soak
def test_a_rank_that_is_stopped_for_a_short_time_continues(start, tmp_path):
    job = start(tmp_path, *LONG[:-1], "--max_steps", 400, "--noeval", num_ranks=2)
    job.wait_for_step(20)
    victim = job.ranks()[1]
    os.kill(victim, signal.SIGSTOP)
    time.sleep(2)  # the fault itself
    assert last_step(tmp_path) < 400
    os.kill(victim, signal.SIGCONT)
    code, output = job.finish()
    assert code == 0, output
    assert last_step(tmp_path) == 400


@pytest.mark.parametrize(
    "fault",
    [
        "fail:1:20:before",
        pytest.param("fail:0:20:after", marks=pytest.mark.soak),
        pytest.param("fail_to_prepare:1", marks=pytest.mark.soak),
    ],
)
def test_an_exception_on_one_rank_is_printed_once(start, tmp_path, fault):
    job = start(tmp_path, *LONG, num_ranks=2, fault=fault, forked=True)
    assert job.finish(timeout=40)[0] == 1
    rank = 0 if ":0:" in fault else 1
    start_of_line = f"lm: error: rank {rank} on {socket.gethostname()}: "
    errors = [line for line in job.output.splitlines() if line.startswith("lm: error: ")]
    assert errors == [
        f"{start_of_line}Traceback (most recent call last):",
        f"{start_of_line}RuntimeError: the injected cause",
    ]
    assert job.output.splitlines()[-1] == errors[-1]  # after the lines of mpirun


def test_a_rank_that_stops_in_a_command_is_named(start, tmp_path, corpora):
    train_here(tmp_path, *config_flags(corpora), "--hidden_size", 8, "--max_steps", 2, "--noeval")
    command = [*mpirun(2), *fork_server.python(), "-m", "tests.faults.inject"]
    command += ["stop_in_evaluation:1", "--run", tmp_path, "--step_timeout_seconds", 3]
    result = run_command(command, environment(INJECT_INTO="lm.evaluate"), timeout=60)
    error = one_error(result, 1, num_ranks=2)
    assert re.search("rank 0 .* for [34] s in the evaluation of valid, waiting for rank 1 ", error)
    assert "which is stopped or gone" in error


@pytest.mark.soak
def test_a_shared_evaluation_may_be_slow_but_not_stop(start, tmp_path):
    # The batches have one row, so rank 1 has no work and waits. Rank 0 stops during the test.
    flags = ("--hidden_size", 8, "--max_steps", 10, "--step_timeout_seconds", 3)
    shared = ("--distributed_eval", "--eval_batch_size", 1, "--num_steps", 50)
    job = start(tmp_path, *flags, *shared, num_ranks=2, fault="stop_in_test:0", forked=True)
    code, output = job.finish()
    assert events(tmp_path, "epoch") and not events(tmp_path, "test"), output
    assert code == 1
    assert re.search("no progress for [34] s in the evaluation of test, waiting for", output)


@pytest.mark.soak
def test_all_other_ranks_wait_quietly_while_rank_0_evaluates(start, tmp_path):
    # Two splits of 51 windows take longer than the timeout.
    flags = ("--hidden_size", 8, "--max_steps", 10, "--step_timeout_seconds", 4)
    started = time.monotonic()
    job = run(start, tmp_path, *flags, num_ranks=2, fault="slow_evaluation:0.1")
    assert time.monotonic() - started > 2 * 51 * 0.1
    for word in ("stalled", "warning", "timed out", "error"):
        assert word not in job.output.lower()
