"""Stop signals end a process at once, or wait until the caller has saved."""

import signal
import subprocess
import sys

import pytest

from tests.commands import environment

PROGRAM = """
import signal, sys, time
from lm.distributed.signals import Signals

signals = Signals()
{work}
"""


def stop(work, *numbers, prefix=()):
    """Send signals to a program, each after its next line; return exit code and lines."""
    command = [*prefix, sys.executable, "-c", PROGRAM.format(work=work)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup pytest
    with subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, **pipes) as process:
        lines = []
        for number in numbers:
            lines.append(process.stdout.readline())
            process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    return process.returncode, [*lines, *output.splitlines(keepends=True)]


@pytest.mark.parametrize(
    "number, name",
    [
        (signal.SIGINT, "SIGINT"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGUSR2, "SIGTERM"),
        (signal.SIGHUP, "SIGTERM"),
    ],
)
def test_before_there_is_anything_to_save_a_signal_ends_the_process(tmp_path, number, name):
    work = "from lm.files import temporary_directory\nsys.stdout = open(1, 'w', 9999)\n"
    work += "print('result')\n"
    work += f"with temporary_directory({str(tmp_path)!r}, 'a') as path:\n"
    work += "    print('ready', file=sys.stderr, flush=True)\n    time.sleep(30)"
    code, lines = stop(work, number)
    assert code == 128 + getattr(signal, name)
    assert lines == ["ready\n", "result\n", f"lm: stopped by {name}\n"]
    assert not list(tmp_path.iterdir())


def test_work_that_catches_or_loses_exceptions_is_ended_too():
    work = "class Lost:\n    def __del__(self): time.sleep(30)\n"
    work += "while True:\n    print('ready', flush=True)\n"
    work += "    try: Lost()\n    except BaseException: pass"
    assert stop(work, signal.SIGTERM) == (143, ["ready\n", "lm: stopped by SIGTERM\n"])


def test_a_signal_ends_a_process_whose_output_nobody_reads():
    work = "import os\nsys.stdout = open(1, 'w', 9999)\nprint('result')\n"
    work += "reader, writer = os.pipe()\nos.dup2(writer, 1)\nos.close(reader)\n"
    work += "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
    work += "print('ready', file=sys.stderr, flush=True)\ntime.sleep(30)"
    assert stop(work, signal.SIGINT) == (130, ["ready\n", "lm: stopped by SIGINT\n"])


def test_missing_files_are_not_reported():
    work = "import os, lm.distributed.signals as module\n"
    work += "act = module.act_at_stop\n"
    work += "module.act_at_stop = lambda: (act(), time.sleep(0.5))\n"
    work += "from lm.files import temporary_directory\n"
    work += "with temporary_directory(None, 'a') as path:\n    print('ready', flush=True)\n"
    work += "    while True: os.stat(path)"
    assert stop(work, signal.SIGTERM) == (143, ["ready\n", "lm: stopped by SIGTERM\n"])


def test_a_caller_gets_an_interrupt_even_if_it_becomes_a_different_error():
    work = "signals.close(); signals = Signals(exits=False)\n"
    work += "try:\n    with signals.as_interrupt():\n"
    work += "        try: print('ready', flush=True); time.sleep(30)\n"
    work += "        except KeyboardInterrupt: raise TypeError\n"
    work += "except KeyboardInterrupt as error: print(error.args)\n"
    # After a lost interrupt, training stops and saves. The errors of the save are not replaced.
    work += "signals.defer()\n"
    work += "try:\n    with signals.as_interrupt(): raise OSError\n"
    work += "except OSError: print('not saved')"
    expected = ["ready\n", f"({int(signal.SIGTERM)},)\n", "not saved\n"]
    assert stop(work, signal.SIGTERM) == (0, expected)


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


def test_a_deferred_stop_is_acknowledged_at_once_and_can_be_repeated(tmp_path):
    work = "from lm.files import temporary_directory\n"
    work += f"with temporary_directory({str(tmp_path)!r}, 'a'):\n"
    work += "    signals.defer(); print('ready', flush=True); time.sleep(30)"
    code, lines = stop(work, signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert lines[1:] == [
        "lm: stopping after this step and saving; Ctrl-C again ends without saving\n",
        "lm: interrupted twice: stopping immediately\n",
    ]
    assert list(tmp_path.iterdir())  # It may be a checkpoint that is complete soon.


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
