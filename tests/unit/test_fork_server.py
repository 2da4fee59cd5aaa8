"""Programs that the fork server of the tests starts behave as if Python started them."""

import os
import select
import signal
import subprocess
import sys

import pytest

from tests import fork_server

PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
print(sys.argv[1:], os.getcwd(), os.environ["LM_MINE"], os.getppid(), input(), flush=True)
print("TensorFlow is", "tensorflow" in sys.modules, "in", sys.executable, file=sys.stderr)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts PROGRAM, and returns its process and the PID that it prints."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    started = []

    def start(*command, cwd=tmp_path):
        pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
        env = {**os.environ, "LM_MINE": "x"}
        started.append(subprocess.Popen(command, cwd=cwd, env=env, text=True, **pipes))
        return started[-1], int(started[-1].stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for_end(pid):
    assert select.select([os.pidfd_open(pid)], [], [], 30)[0]


def test_a_program_has_the_arguments_streams_and_parent_of_its_command(start, tmp_path):
    process, _ = start(*fork_server.python(LM_MINE="x"), "-m", "mine", "a b")
    process.stdin.write("text\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"['a b'] {tmp_path} x {os.getpid()} text\n"
    assert process.stderr.readline() == f"TensorFlow is True in {fork_server.start()}\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 7


def test_a_program_and_its_command_end_together(start):
    process, pid = start(*fork_server.python(), "-m", "mine")
    process.kill()
    wait_for_end(pid)
    process, pid = start(*fork_server.python(), "-m", "mine")
    os.kill(pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_variables_that_may_affect_imports_need_a_new_process():
    assert fork_server.python(PYTHONPATH="/x") == [sys.executable]
