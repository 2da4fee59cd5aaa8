"""Check whether this machine or cluster is ready to train: `python -m lm.check`.

The command starts its ranks with mpirun, and rank 0 prints the results. Under mpirun, srun or
horovodrun, it checks the ranks that the launcher started. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from lm.check.checklist import FAIL, FAILURE, OK, WARN, Checklist
from lm.cli import program
from lm.cli.flags import parse
from lm.distributed import launch
from lm.distributed.communicator import Communicator
from lm.errors import ERROR, RunError, UserError
from lm.options import Checked, option

_USAGE = """\
Check that this machine or cluster is ready to train; each line is OK, WARN or FAIL.

  python -m lm.check
  python -m lm.check --hosts host1:1,host2:1
  mpirun -np 2 -H host1:1,host2:1 python -m lm.check"""
_SETUP = "run run_scripts/setup.sh, then run this again with .venv/bin first in PATH"
_TIMEOUT_SECONDS = 180


@dataclasses.dataclass(frozen=True)
class CheckOptions(Checked):
    """The options of the check."""

    hosts: str | None = option(None, "host:ranks,... like mpirun -H (default: 2 ranks here)")
    output_dir: str = option("runs", "directory for future runs", is_path=True)


def main() -> None:
    """Run the checks if a launcher started this process; otherwise start ranks that do."""
    if launch.launched_size() > 1:
        program.run(_parse, _check)
    else:
        program.run_alone(lambda argv: start_ranks(_parse(argv)))


def _parse(argv: Sequence[str]) -> CheckOptions:
    return parse(argv, _USAGE, CheckOptions)[CheckOptions]


def _check(options: CheckOptions, comm: Communicator) -> None:
    from lm.check.ranks import check_ranks  # imports TensorFlow

    check_ranks(options.output_dir, comm)


def start_ranks(options: CheckOptions) -> None:
    """Run the checks in new ranks under mpirun.

    Raises:
      UserError: If there would be only one rank.
      RunError: If a check failed; the printed lines describe the problem.
    """
    if "OMPI_COMM_WORLD_SIZE" in os.environ:  # Open MPI does not start mpirun inside mpirun
        raise UserError("the check needs two or more ranks: use mpirun -np 2, or no mpirun")
    checklist = Checklist()
    if shutil.which("mpirun") is None:
        checklist.add(FAIL, "mpirun", "mpirun is not in PATH", _SETUP)
    elif importlib.util.find_spec("horovod") is None:
        checklist.add(FAIL, "horovod", "Horovod is not installed", _SETUP)
    else:
        launcher = launch_command(options.hosts)
        checklist.add(OK, "mpirun", shlex.join(launcher))
        for_root = launch.root_permission()
        if for_root:
            fix = "export " + " ".join(f"{name}={value}" for name, value in for_root.items())
            checklist.add(WARN, "root", "Open MPI does not start ranks for root", fix)
        output_dir = os.path.abspath(options.output_dir)
        worker = [sys.executable, "-m", "lm.check", "--output_dir", output_dir]
        _run(checklist, [*launcher, *worker])
    if checklist.counts[FAIL]:
        checklist.conclude()
        raise RunError(FAILURE)


def launch_command(hosts: str | None) -> list[str]:
    """Return the mpirun command for hosts such as "host1:1,host2:1", or for two local ranks.

    Raises:
      UserError: If there is only one rank.
    """
    num_ranks = sum(launch.slots_of_hosts(hosts)) if hosts else 2
    if num_ranks < 2:
        raise UserError(f"hosts: the check needs two or more ranks, such as {hosts},other:1")
    return launch.mpirun_command(num_ranks, hosts)


def _run(checklist: Checklist, command: list[str]) -> None:
    code = None
    # A file, because mpirun would block on a full pipe.
    with tempfile.TemporaryFile(mode="w+", errors="replace") as stderr:
        process = subprocess.Popen(
            command,
            env=launch.mpirun_environment(),
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # a process group of its own, which is killed at the end
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_TIMEOUT_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all processes exited
                os.killpg(process.pid, signal.SIGKILL)
        stderr.seek(0)
        lines = [line.rstrip() for line in stderr if line.strip(" -\n")]
    errors = [line for line in lines if line.startswith(ERROR)]
    if code and any(FAILURE in line for line in errors):  # the ranks printed the problem
        raise RunError(FAILURE)
    first = [*errors, *lines, "mpirun printed nothing"][0]
    if code is None:
        fix = (
            "if the hosts cannot reach each other, open the firewall between them, and select the"
            " interface: export OMPI_MCA_btl_tcp_if_include=eth0 OMPI_MCA_oob_tcp_if_include=eth0"
        )
        checklist.add(FAIL, "ranks", f"no answer within {_TIMEOUT_SECONDS} s; {first}", fix)
    elif code:
        fix = "the ranks cannot run the checks before this error is fixed"
        if not errors:
            fix = (
                "each host must be reachable by ssh without a password, and have the same checkout"
                " and .venv at the same path"
            )
        checklist.add(FAIL, "ranks", f"mpirun ended with exit code {code}: {first}", fix)


if __name__ == "__main__":
    main()
