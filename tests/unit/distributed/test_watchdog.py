"""When a rank without progress is ended: real processes, which need no TensorFlow."""

import signal
import subprocess
import sys
import time

import pytest

from lm.distributed.watchdog import Process, _waited_for

PROGRAM = """
import signal, time
from lm.distributed import watchdog
watchdog._TICK_SECONDS, watchdog._GRACE_SECONDS = 0.02, 0.5
own, stop = watchdog.own_process(), 0
dog = watchdog.Watchdog({timeout}, [own, own], 0, lambda: stop)
{phases}
print("alive")
"""
STOP = "stop = signal.SIGTERM"
STEP = "dog.beat('step 7', stoppable=True)"
SAVE = "dog.beat('the save at step 7')"


def run(*phases, timeout=600):
    program = PROGRAM.format(timeout=timeout, phases="\n".join(phases))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )


def test_a_step_that_does_not_end_after_a_stop_signal_ends_the_rank():
    result = run(STEP, "time.sleep(1)", STOP, "time.sleep(30)")
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "")


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param((STEP, STOP, SAVE, "time.sleep(3)"), id="a save"),
        pytest.param((STEP, "time.sleep(1)", STEP, STOP, "time.sleep(2)"), id="as steps are long"),
        pytest.param(("for _ in range(30): " + STEP + "; time.sleep(0.1)",), id="progress"),
    ],
)
def test_a_stop_signal_leaves_time_for(phases):
    assert run(*phases, timeout=2.5 if "range" in phases[0] else 600).stdout == "alive\n"


def test_a_save_that_does_not_end_is_named_at_the_timeout():
    result = run(STEP, STOP, SAVE, "time.sleep(30)", timeout=1)
    assert result.returncode == 1
    assert "no progress for 1 s in the save at step 7, waiting for rank 1" in result.stderr


def test_what_is_no_progress_does_not_put_off_the_timeout():
    again = "for _ in range(300): dog.beat('a write', alone=True, progress=False); time.sleep(0.1)"
    result = run(SAVE, "time.sleep(0.5)", again, timeout=1)
    assert result.returncode == 1
    assert "no progress for 1 s in a write (--step_timeout_seconds)" in result.stderr


def test_time_in_which_the_whole_job_was_suspended_does_not_count():
    wait = "print('begun', flush=True); input(); time.sleep(1.5)"
    program = PROGRAM.format(timeout=2, phases=f"{STEP}\n{wait}")
    command, pipes = [sys.executable, "-c", program], dict.fromkeys(("stdin", "stdout"), -1)
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)  # the fault itself
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate("\n", timeout=30)
    assert (process.returncode, output) == (0, "alive\n")


def test_what_is_waited_for_is_named_briefly_on_many_hosts():
    ranks = [Process(f"node{rank // 8}", 1) for rank in range(1000)]
    assert _waited_for(ranks[:24], 0) == "ranks 8 to 15 on node1 or ranks 16 to 23 on node2"
    assert _waited_for(ranks, 0) == "the ranks on 124 other hosts"
