"""Start the ranks of a check-up through mpirun, and say what is wrong if they do not come up."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

from lm.check.checklist import FAIL, FAILURE, OK, WARN, Checklist
from lm.distributed import launch
from lm.errors import ERROR, RunError, UserError

_NUM_LOCAL_RANKS = 2
_SETUP = "run run_scripts/setup.sh, then run this again with .venv/bin first in PATH"


def start_ranks(hosts: str, output_dir: str, mpirun_flags: str, timeout_seconds: int) -> None:
    """Run the check-up on the ranks of some hosts, and pass on what rank 0 prints.

    Args:
      hosts: "host1:1,host2:1"; empty for two ranks on this host.
      output_dir: Where runs are to be written.
      mpirun_flags: More flags for mpirun.
      timeout_seconds: For the whole check-up.

    Raises:
      UserError: A flag cannot be used.
      RunError: Something is not ready; the lines say what.
    """
    if "OMPI_COMM_WORLD_SIZE" in os.environ:  # Open MPI's mpirun refuses to start another one
        raise UserError("a check-up needs two ranks or more: give mpirun -np 2, or leave it out")
    checklist = Checklist()
    if shutil.which("mpirun") is None:
        checklist.add(FAIL, "mpirun", "there is no mpirun in PATH", _SETUP)
    elif importlib.util.find_spec("horovod") is None:
        checklist.add(FAIL, "horovod", "Horovod is not installed", _SETUP)
    else:
        launcher = launch_command(hosts, mpirun_flags)
        checklist.add(OK, "mpirun", shlex.join(launcher))
        for_root = launch.root_permission()
        if for_root:
            remedy = "export " + " ".join(f"{name}={value}" for name, value in for_root.items())
            checklist.add(WARN, "root", "Open MPI does not start ranks for root", remedy)
        program = ["-m", "lm.check", "--output_dir", os.path.abspath(output_dir)]
        _run(checklist, [*launcher, sys.executable, *program], timeout_seconds)
    if checklist.counts[FAIL]:
        checklist.conclude()
        raise RunError(FAILURE)


def launch_command(hosts: str, mpirun_flags: str) -> list[str]:
    """Return mpirun and its flags.

    Raises:
      UserError: hosts or mpirun_flags cannot be understood, or there is one rank.
    """
    try:
        more = shlex.split(mpirun_flags)
    except ValueError as error:
        raise UserError(f"mpirun_flags must be like a command line: {error}") from error
    num_ranks = sum(launch.slots_of_hosts(hosts)) if hosts else _NUM_LOCAL_RANKS
    if num_ranks < 2:
        raise UserError(f"hosts: a check-up needs two ranks or more, such as {hosts},other:1")
    return [*launch.mpirun_command(num_ranks, hosts), *more]


def _run(checklist: Checklist, command: list[str], timeout_seconds: int) -> None:
    # A file, not a pipe, which nobody would read meanwhile.
    with tempfile.TemporaryFile(mode="w+", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            env=launch.mpirun_environment(),
            stdin=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # so that nothing of it outlives the check-up
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and all that it started
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        said = [line.rstrip() for line in errors if line.strip(" -\n")]
    if code == 0:
        return
    ours = [line for line in said if line.startswith(ERROR)]
    if any(FAILURE in line for line in ours):  # the ranks have said what
        raise RunError(FAILURE)
    first = [*ours, *said, "mpirun printed nothing"][0]
    if code is None:
        found = f"no answer within {timeout_seconds} s; {first}"
        remedy = (
            "if the hosts cannot reach each other, choose the interface with --mpirun_flags"
            ' "-mca btl_tcp_if_include eth0 -mca oob_tcp_if_include eth0", and open the firewall'
            " between them"
        )
    else:
        found = f"mpirun ended with exit code {code}: {first}"
        remedy = (
            "each host must be reachable by ssh without a password, and have the same checkout"
            " and .venv at the same path"
        )
    checklist.add(FAIL, "ranks", found, remedy)
