"""Stop signals end a process at once, or wait until the caller has saved."""

import signal
import subprocess
import sys

import pytest

from tests.commands import environment

PROGRAM = """
import time
from lm.distributed.signals import Signals

signals = Signals()
{work}
"""


def stop(work, *numbers, prefix=()):
    """Send signals to a program, each after its next line; return exit code and lines."""
    command = [*prefix, sys.executable, "-c", PROGRAM.format(work=work)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, **pipes) as process:
        lines = []
        for number in numbers:
            lines.append(process.stdout.readline())
            process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    return process.returncode, [*lines, *output.splitlines(keepends=True)]


@pytest.mark.parametrize(
    "number, raised",
    [(signal.SIGINT, signal.SIGINT), (signal.SIGUSR2, signal.SIGTERM)],
)
def test_before_there_is_anything_to_save_a_signal_interrupts_the_work(number, raised):
    work = "try: print('ready', flush=True); time.sleep(30)\n"
    work += "except KeyboardInterrupt as error: print(error.args)"
    assert stop(work, number) == (0, ["ready\n", f"({int(raised)},)\n"])


def test_work_that_ignores_the_interrupt_ends_within_a_second():
    work = "while True:\n    try: print('ready', flush=True); time.sleep(30)\n"
    work += "    except KeyboardInterrupt: pass"
    code, lines = stop(work, signal.SIGTERM)
    assert (code, lines[-1]) == (143, "lm: stopped by SIGTERM\n")


def test_an_interrupt_that_becomes_a_different_error_stays_an_interrupt():
    work = "try:\n    with signals.as_interrupt():\n"
    work += "        try: print('ready', flush=True); time.sleep(30)\n"
    work += "        except KeyboardInterrupt: raise TypeError\n"
    work += "except KeyboardInterrupt as error: print(error.args)"
    assert stop(work, signal.SIGTERM) == (0, ["ready\n", f"({int(signal.SIGTERM)},)\n"])


def test_an_interrupt_that_is_lost_prints_no_stack():
    work = "class Lost:\n    def __del__(self): print('ready', flush=True); time.sleep(30)\n"
    work += "Lost()\nprint('continues', flush=True); time.sleep(30)"
    expected = ["ready\n", "continues\n", "lm: stopped by SIGTERM\n"]
    assert stop(work, signal.SIGTERM) == (143, expected)


def test_the_process_of_a_caller_is_never_ended():
    work = "signals.close(); signals = Signals(exits=False)\n"
    work += "try: print('ready', flush=True); time.sleep(30)\n"
    work += "except KeyboardInterrupt: time.sleep(1.5)\nsignals.close()\n"
    work += "signals = Signals(exits=False); signals.defer()\n"
    work += "try:\n    print('saves', flush=True)\n    while not signals.stop: time.sleep(0.01)\n"
    work += "    print('handled', flush=True); time.sleep(30)\n"
    work += "except KeyboardInterrupt: print('kept')"
    # Two signals are handled once if they arrive together, so the last one follows two lines: the
    # acknowledgment of a thread, and the line of the main thread. The signal 0 does nothing.
    code, lines = stop(work, signal.SIGINT, signal.SIGINT, 0, signal.SIGINT)
    assert code == 0 and "stopping after this step" in "".join(lines[2:4])
    assert lines[-1] == "kept\n"


def test_a_deferred_stop_is_acknowledged_at_once_and_can_be_repeated():
    work = "signals.defer(); print('ready', flush=True); time.sleep(30)"
    code, lines = stop(work, signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert lines[1:] == [
        "lm: stopping after this step and saving; Ctrl-C again ends without saving\n",
        "lm: interrupted twice: stopping immediately\n",
    ]


def test_a_stop_that_may_follow_the_failure_of_a_rank_promises_no_save():
    work = "signals.defer(); print('ready', flush=True)\n"
    work += "while not signals.stop: time.sleep(0.01)\nsignals.close()"
    _, lines = stop(work, signal.SIGTERM)
    assert lines[1:] == ["lm: stopping after this step and saving, if all ranks complete it\n"]


def test_under_nohup_a_closed_terminal_stops_nothing():
    work = "import os; signals.defer(); os.kill(os.getpid(), 1); print('ready', flush=True)\n"
    work += "while not signals.stop: time.sleep(0.01)\nprint(signals.stop)"
    code, lines = stop(work, signal.SIGINT, prefix=["nohup"])
    assert (code, lines[-1]) == (0, f"{int(signal.SIGINT)}\n")
