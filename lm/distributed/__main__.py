"""Print the settings of mpirun as shell code, for run_scripts/launch.sh.

The code exports the defaults of Open MPI, and sets the following variables:

  per_task        names of Slurm's variables that mpirun must not inherit
  pass_on         options that pass environment variables to other hosts
  HOSTS           hosts of the scheduler's allocation, unless the user selected hosts
  threads         cores of each rank in the allocation, or nothing
  local_ranks     ranks on this host if there is no allocation
  places          NUMA domains or sockets of this host if $PLACE selects them, otherwise 1
  job, job_index  name of the scheduler's job, and its index in an array of jobs
"""

import os
import shlex
import sys

from lm.distributed.allocation import find_job, read_allocation
from lm.distributed.mpirun import (
    PER_TASK,
    count_places,
    mpirun_environment,
    passed_variables,
    place,
)
from lm.errors import ProgramExit


def _shell_code() -> list[str]:
    places = count_places()
    if place() != "none" and places == 1:
        warning = f"PLACE={place()} has no effect, because this host has only one"
        print(f"lm: warning: {warning}", file=sys.stderr)
    has_hosts = os.environ.get("HOSTS") or os.environ.get("HOSTFILE")
    allocation = None if has_hosts else read_allocation(int(os.environ.get("NP") or 0), places)
    job, index = find_job()
    environment = mpirun_environment()
    changed = {k: v for k, v in environment.items() if os.environ.get(k) != v}
    variables = {
        **({"HOSTS": allocation.hosts} if allocation else {}),
        "threads": (allocation.threads if allocation else None) or "",
        "local_ranks": places if places > 1 else 2,
        "places": places,
        "job": job,
        "job_index": index,
    }
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in changed.items()),
        *(f"{name}={shlex.quote(str(value))}" for name, value in variables.items()),
        f"per_task=({shlex.join(PER_TASK)})",
        f"pass_on=({shlex.join(passed_variables())})",
    ]


if __name__ == "__main__":
    try:
        print("\n".join(_shell_code()))
    except ProgramExit as error:
        print(f"lm: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
