"""Check whether this machine or cluster is ready to train: `python -m lm.check`.

The command starts its ranks with mpirun, and rank 0 prints the results. Under mpirun, srun or
horovodrun, it checks the ranks that the launcher started. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

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
_TIMEOUT_SECONDS = 180
_FIX = (
    "each host must accept ssh without a password, have the same checkout and .venv at the same"
    " path, and reach the other hosts; export OMPI_MCA_btl_tcp_if_include=eth0"
    " OMPI_MCA_oob_tcp_if_include=eth0 selects a network interface"
)

logger = logging.getLogger("lm")


@dataclasses.dataclass(frozen=True)
class CheckOptions(Checked):
    """Options of `lm.check`."""

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
    """Run the checks in new ranks under mpirun."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:  # Open MPI does not start mpirun inside mpirun
        raise UserError("the check needs two or more ranks: use mpirun -np 2, or no mpirun")
    launcher = launch_command(options.hosts)
    for_root = launch.root_permission()
    if for_root:
        variables = " ".join(f"{name}={value}" for name, value in for_root.items())
        logger.warning("Open MPI does not start ranks for root: export %s", variables)
    output_dir = os.path.abspath(options.output_dir)
    worker = [sys.executable, "-m", "lm.check", "--output_dir", output_dir]
    code, lines = _run([*launcher, *worker])
    if code == 0:
        return
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    if errors:
        raise RunError(errors[0])
    ending = f"ended with exit code {code}" if code else f"ran over {_TIMEOUT_SECONDS} s"
    raise RunError(f"mpirun {ending} ({lines[0] if lines else 'no message'}): {_FIX}")


def launch_command(hosts: str | None) -> list[str]:
    """Return the mpirun command for hosts such as "host1:1,host2:1", or for two local ranks."""
    num_ranks = sum(launch.slots_of_hosts(hosts)) if hosts else 2
    if num_ranks < 2:
        raise UserError(f"hosts: the check needs two or more ranks, such as {hosts},other:1")
    return launch.mpirun_command(num_ranks, hosts)


def _run(command: list[str]) -> tuple[int | None, list[str]]:
    """Return the exit code, or None after a timeout, and the lines of stderr."""
    # Use a file, because processes that outlive mpirun would keep a pipe open.
    with tempfile.TemporaryFile(mode="w+", errors="replace") as stderr:
        process = subprocess.Popen(
            command,
            env=launch.mpirun_environment(),
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_TIMEOUT_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all processes exited
                os.killpg(process.pid, signal.SIGKILL)
        stderr.seek(0)
        return code, [line.rstrip() for line in stderr if line.strip(" -\n")]


if __name__ == "__main__":
    main()
