"""The tools of the tests: a test that times out leaves no processes."""

import os
import pathlib
import signal

import pytest

from tests.commands import environment, run_command


@pytest.fixture
def _usr1_raises():
    """Raises an exception in a signal handler, like pytest-timeout."""

    def raise_timeout(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, raise_timeout)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_usr1_raises")
def test_a_test_that_times_out_leaves_no_process(tmp_path):
    # Like some ranks, the process has its own session and ignores SIGTERM.
    rank = tmp_path / "rank.sh"
    rank.write_text("trap '' TERM\necho $$ >pid\nsleep 600\n")
    script = f"setsid sh {rank} & until [ -s pid ]; do sleep 0.1; done; kill -USR1 {os.getpid()}"
    with pytest.raises(TimeoutError):
        run_command(["sh", "-c", f"{script}; sleep 600"], environment(), timeout=60, cwd=tmp_path)
    status = pathlib.Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    # The process ended, but init may not have reaped it yet.
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
