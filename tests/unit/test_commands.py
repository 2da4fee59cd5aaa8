"""The tests' own tools: a test that is out of time leaves nothing running."""

import os
import pathlib
import signal

import pytest

from tests.commands import environment, run_command


@pytest.fixture
def _usr1_raises():
    """As pytest-timeout ends a test: an exception out of a signal handler."""

    def out_of_time(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, out_of_time)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_usr1_raises")
def test_a_test_out_of_time_leaves_no_process(tmp_path):
    # In a session of its own and deaf to SIGTERM, as a rank may be.
    rank = tmp_path / "rank.sh"
    rank.write_text("trap '' TERM\necho $$ >pid\nsleep 600\n")
    script = f"setsid sh {rank} & until [ -s pid ]; do sleep 0.1; done; kill -USR1 {os.getpid()}"
    with pytest.raises(TimeoutError):
        run_command(["sh", "-c", f"{script}; sleep 600"], environment(), timeout=60, cwd=tmp_path)
    status = pathlib.Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    # Gone, or dead and not yet collected by init.
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
