"""The tests' own tools: a test that is out of time leaves nothing running."""

import pathlib
import subprocess

import pytest

from tests.commands import environment, run_command


def test_a_command_out_of_time_leaves_no_process(tmp_path):
    # In a session of its own and deaf to SIGTERM, as a rank may be.
    rank = tmp_path / "rank.sh"
    rank.write_text("trap '' TERM\necho $$ >pid\nsleep 600\n")
    command = ["sh", "-c", f"setsid sh {rank} & sleep 600"]
    with pytest.raises(subprocess.TimeoutExpired):
        run_command(command, environment(), timeout=2, cwd=tmp_path)
    status = pathlib.Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    # Gone, or dead and not yet collected by init.
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
