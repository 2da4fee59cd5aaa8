"""The supervisor ends ranks that hang, and keeps working and waiting ranks in touch."""

import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from lm.distributed import supervisor
from lm.distributed.communicator import Communicator
from lm.distributed.supervisor import Interrupted, Waiting, _Process, _waited_for
from tests.commands import run_code
from tests.meeting import on_ranks

# A real process without TensorFlow. Its two ranks are the process itself, so both are running.
PROGRAM = """
import signal, time
from lm.distributed import supervisor
from lm.distributed.communicator import Communicator

class TwoRanks(Communicator):
    size = 2

    def gather(self, value):
        return [value] * 2

supervisor._TICK_SECONDS, supervisor._GRACE_SECONDS = 0.02, 0.5
watched = supervisor.Supervisor(TwoRanks(), {timeout})
{phases}
print("alive")
"""
STOP = "watched.signals.stop = signal.SIGTERM"
STEP = "watched.enter('step 7', stoppable=True)"
SAVE = "watched.enter('the save at step 7')"


def run(*phases, timeout=600):
    return run_code(PROGRAM.format(timeout=timeout, phases="\n".join(phases)))


def test_a_step_that_hangs_after_a_stop_signal_ends_the_rank():
    result = run(STEP, "time.sleep(1)", STOP, "time.sleep(30)")
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "")


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param((STEP, STOP, SAVE, "time.sleep(3)"), id="a save"),
        pytest.param((STEP, "time.sleep(1)", STEP, STOP, "time.sleep(2)"), id="a usual step"),
        pytest.param(("for _ in range(30): " + STEP + "; time.sleep(0.1)",), id="progress"),
    ],
)
def test_the_supervisor_allows_time_for(phases):
    assert run(*phases, timeout=2.5 if "range" in phases[0] else 600).stdout == "alive\n"


def test_a_save_that_hangs_is_named_at_the_timeout():
    result = run(STEP, STOP, SAVE, "time.sleep(30)", timeout=1)
    assert result.returncode == 1
    assert "no progress for 1 s in the save at step 7, waiting for rank 1" in result.stderr


def test_phases_without_progress_do_not_extend_the_timeout():
    enter = "watched.enter('a write', alone=True, progress=False)"
    again = f"for _ in range(300): {enter}; time.sleep(0.1)"
    result = run(SAVE, "time.sleep(0.5)", again, timeout=1)
    assert result.returncode == 1
    assert "no progress for 1 s in a write (--step_timeout_seconds)" in result.stderr


def test_time_while_the_job_is_suspended_does_not_count():
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


def test_messages_name_ranks_on_many_hosts_briefly():
    ranks = [_Process(f"node{rank // 8}", 1) for rank in range(1000)]
    assert _waited_for(ranks[:24], 0) == "ranks 8 to 15 on node1 or ranks 16 to 23 on node2"
    assert _waited_for(ranks, 0) == "the ranks on 124 other hosts"


def meet(monkeypatch, num_ranks, work, stop_requested=lambda rank: 0):
    """Run work(waiting, rank) and gather the ranks on threads; return outcomes and phase counts."""
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0)
    num_phases = [0] * num_ranks

    def run_rank(rank, gather):
        class Watched:
            @property
            def signals(self):
                return types.SimpleNamespace(stop=stop_requested(rank))

            def enter(self, phase, stoppable, progress):
                num_phases[rank] += progress

        comm = Communicator()
        comm.gather = gather
        waiting = Waiting(comm, Watched(), "the evaluation", stoppable=True)
        try:
            work(waiting, rank)
            return waiting.gather(rank)
        except Interrupted as interruption:
            return interruption.number

    return on_ranks(num_ranks, run_rank), num_phases


@pytest.mark.parametrize("pieces", [(50, 0, 0), (0, 50, 20), (50, 50, 50)])
def test_waiting_ranks_see_that_other_ranks_work(monkeypatch, pieces):
    def work(waiting, rank):
        for _ in range(pieces[rank]):
            waiting.poll()

    outcomes, num_phases = meet(monkeypatch, 3, work)
    assert outcomes == [[0, 1, 2]] * 3
    assert min(num_phases) >= 50


@pytest.mark.parametrize("busy, signalled", [(0, 1), (1, 0), (1, 1)])
def test_a_stop_signal_interrupts_working_and_waiting_ranks(monkeypatch, busy, signalled):
    stopped = threading.Event()

    def work(waiting, rank):
        while rank == busy:
            waiting.poll()
            stopped.set()

    def stop_requested(rank):
        return 15 * (rank == signalled and stopped.is_set())

    assert meet(monkeypatch, 2, work, stop_requested)[0] == [15, 15]
