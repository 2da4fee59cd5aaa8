"""Check whether this machine or cluster is ready to train; each line is OK, WARN or FAIL.

  python -m lm.check
  python -m lm.check --hosts host1:1,host2:1
  mpirun -np 2 -H host1:1,host2:1 python -m lm.check

Without a launcher, the command starts its ranks with mpirun. The exit code is 1 if a check failed.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from lm.cli import program
from lm.cli.parser import parse
from lm.distributed.allocation import read_allocation
from lm.distributed.communicator import Communicator
from lm.distributed.launch import launched_size
from lm.distributed.mpirun import mpirun_command, mpirun_environment, slots_of_hosts
from lm.distributed.supervisor import Supervisor
from lm.errors import ERROR, RunError, UserError
from lm.options import Checked, option
from lm.system import ends_with_this_process

TIMEOUT_SECONDS = 180
_FIX = (
    "each host must accept ssh without a password, have the same checkout and .venv at the same"
    " path, and reach the other hosts; export OMPI_MCA_btl_tcp_if_include=eth0"
    " OMPI_MCA_oob_tcp_if_include=eth0 selects a network interface"
)


@dataclasses.dataclass(frozen=True)
class CheckOptions(Checked):
    """Options of `lm.check`."""

    hosts: str | None = option(
        None,
        "host:ranks,... like mpirun -H (default: the scheduler's hosts, or 2 ranks here)",
    )


def _parse(argv: Sequence[str]) -> CheckOptions:
    return parse(argv, __doc__, CheckOptions)[CheckOptions]


def _check(_options: CheckOptions, comm: Communicator, _supervisor: Supervisor) -> None:
    from lm.check.ranks import check_ranks  # imports TensorFlow

    check_ranks(comm)


def start_ranks(options: CheckOptions) -> None:
    """Run the checks in new ranks under mpirun."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:  # Open MPI does not start mpirun inside mpirun
        raise UserError("the check needs two or more ranks: use mpirun -np 2, or no mpirun")
    given = options.hosts or os.environ.get("HOSTS")
    allocation = None if given else read_allocation()
    if allocation and sum(allocation.ranks.values()) < 2:
        allocation = None  # start two ranks on this host
    hosts = allocation.hosts if allocation else given
    num_ranks = sum(slots_of_hosts(hosts)) if hosts else 2
    if num_ranks < 2:
        raise UserError(f"the check needs two or more ranks: use --hosts {hosts},other:1")
    launcher = mpirun_command(num_ranks, hosts)
    # All ranks may load TensorFlow from the same shared file system.
    timeout = TIMEOUT_SECONDS * (1 + num_ranks / 64)
    _run([*launcher, sys.executable, "-m", "lm.check"], mpirun_environment(hosts), timeout)


def _run(command: Sequence[str], env: Mapping[str, str], timeout: float) -> None:
    # Use a file, because processes that outlive mpirun would keep a pipe open.
    code = None
    with tempfile.TemporaryFile(mode="w+", errors="replace") as stderr:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # ssh without a terminal cannot wait for a password
                preexec_fn=ends_with_this_process(signal.SIGTERM),
                timeout=timeout,
            ).returncode
        stderr.seek(0)
        lines = [line.rstrip() for line in stderr if line.strip(" -\n")]
    if code == 0:
        return
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    if errors:
        raise RunError(errors[0])
    ending, fix = f"ended with exit code {code}", _FIX
    if code is None:
        ending = f"ran over {timeout:.0f} s"
        fix = f"if the file system is slow, run this again; otherwise, {_FIX}"
    raise RunError(f"mpirun {ending} ({lines[0] if lines else 'no message'}): {fix}")


def main() -> None:
    if launched_size() > 1:
        program.run(_parse, _check)
    else:
        program.run_alone(lambda argv: start_ranks(_parse(argv)))


if __name__ == "__main__":
    main()
