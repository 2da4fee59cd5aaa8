"""mpirun's command line and environment, for the programs that start ranks themselves."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import sys
from typing import Optional

from lm.errors import UserError

# run_scripts/env.sh reads the same files.
_OPTIONS = pathlib.Path(__file__).with_name("mpirun_options.conf")
_PASSED_ON = pathlib.Path(__file__).with_name("passed_on.conf")
_HOST = re.compile(r"[^:\s]+(?::([1-9][0-9]*))?")
_ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def command(num_ranks: int, hosts: Optional[str] = None) -> list[str]:
    """Return the launcher's part of a command line.

    Args:
      num_ranks: Number of ranks.
      hosts: As mpirun's -H ("host1:1,host2:1"), or None for this host.

    Raises:
      UserError: There is no mpirun.
    """
    if not shutil.which("mpirun"):
        raise UserError("mpirun is not in PATH: source run_scripts/env.sh, or activate .venv")
    options = _read_words(_OPTIONS)
    if hosts:
        return ["mpirun", *options, *ranks_on(num_ranks, hosts)]
    return ["mpirun", "-np", str(num_ranks), *options]


def ranks_on(num_ranks: int, hosts: str) -> list[str]:
    """Return the words of a command line that start ranks on hosts, between colons of their own.

    Open MPI takes -x, too, for the ranks up to the next colon only.
    """
    passed_on = [name for name in _read_words(_PASSED_ON) if os.environ.get(name)]
    options = [word for name in passed_on for word in ("-x", name)]
    return ["-np", str(num_ranks), "-H", hosts, *options]


def _read_words(path: pathlib.Path) -> list[str]:
    """Return the words of a file without its comments."""
    lines = path.read_text().splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with changes, fit for mpirun; see run_scripts/env.sh."""
    found = {**os.environ, **root_permission(), **changes}
    if not (shutil.which("ssh") or shutil.which("rsh") or "SLURM_JOB_ID" in found):
        # Without either, Open MPI refuses to start ranks even on this very host; a Slurm job's
        # hosts it reaches through srun.
        found.setdefault("OMPI_MCA_plm", "isolated")
    return found


def find_open_mpi() -> None:
    """Let the Open MPI of the Python environment, if it is there, find its own files.

    Its mpirun tells the ranks that it starts itself; srun does not, nor mpirun on another host.
    """
    if os.path.exists(os.path.join(sys.prefix, "bin", "orted")):
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)


def root_permission() -> dict[str, str]:
    """Return the variables that Open MPI demands of root, as far as they are not set."""
    needed = _ROOT_MAY if os.geteuid() == 0 else {}
    return {name: value for name, value in needed.items() if name not in os.environ}


def slots(hosts: str) -> list[int]:
    """Return the ranks that each host of mpirun's -H takes: "host1:2,host2" has 2 and 1.

    Raises:
      UserError: It is something else.
    """
    found = [_HOST.fullmatch(host) for host in hosts.split(",")]
    if not all(found):
        raise UserError(f"hosts must be like host1:1,host2:1, not {hosts!r}")
    return [int(host[1] or 1) for host in found]
