"""Is this machine, or this cluster, ready to train? `python -m lm.check [--hosts a:1,b:1]`.

Starts two ranks on this host, or those of --hosts, through mpirun, and prints a line for each
check: OK, WARN or FAIL, what was found, and for the last two what to do about it. Exit code 0
if nothing failed, else 1. Started by mpirun, srun or horovodrun itself, it checks the ranks that
it finds there.
"""

from lm.cli import program
from lm.distributed.launch import launched_size

USAGE = """\
Check that this machine or cluster is ready to train; each line is OK, WARN or FAIL.

  python -m lm.check
  python -m lm.check --hosts host1:1,host2:1 --mpirun_flags "-mca btl_tcp_if_include eth0"
  mpirun -np 2 -H host1:1,host2:1 python -m lm.check"""


def main() -> None:
    """Run the command line: on a rank where there are ranks, else start some."""
    if launched_size() > 1:
        program.run(_flags, _check)
    else:
        program.run_alone(_start)


def _flags(argv):
    from lm.cli.flags import Flags

    flags = Flags(USAGE)
    flags.define(str, "hosts", "", "host:ranks,... as for mpirun -H (default: this host, 2 ranks)")
    flags.define(str, "output_dir", "runs", "where runs will be written (default: runs)")
    flags.define(str, "mpirun_flags", "", "more flags for mpirun, in one string")
    flags.define(int, "timeout_seconds", 180, "give up after so many seconds (default: 180)")
    flags.parse(argv)
    return flags


def _check(flags, comm):
    from lm.check.ranks import check_ranks

    check_ranks(flags["output_dir"], comm)


def _start(argv):
    from lm.check.launcher import start_ranks

    flags = _flags(argv)
    start_ranks(
        flags["hosts"], flags["output_dir"], flags["mpirun_flags"], flags["timeout_seconds"]
    )


if __name__ == "__main__":
    main()
