"""The provenance of a run: the code, the command, the software and the hosts that produced it."""

import collections
import contextlib
import ctypes
import datetime
import os
import platform
import shlex
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import lm
from lm.distributed.agreement import code_checksum
from lm.distributed.allocation import find_job
from lm.distributed.communicator import Communicator
from lm.errors import without_secrets
from lm.system import PROJECT, cpu_model, package_version

# The optional packages that may influence results.
_PACKAGES = ("tf_keras", "tf_slim", "tokenizers", "sentencepiece")
_GIT_SECONDS = 10


def find_provenance(comm: Communicator) -> dict[str, Any]:
    """Return the facts for run.json and the start event on rank 0, and {} on other ranks.

    All ranks call this together. The command line is recorded without its secrets, and of the
    environment, only the job's ID is recorded.
    """
    ranks = comm.gather((socket.gethostname(), cpu_model()))
    if not comm.is_rank_0:
        return {}
    return {
        "version": lm.__version__,
        "code_sha256": code_checksum(),
        "git_commit": git_commit(PROJECT),
        "command": without_secrets(shlex.join(sys.argv)),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "job": find_job()[0] or None,
        "ranks_by_host": dict(collections.Counter(host for host, _ in ranks)),
        "ranks_by_cpu": dict(collections.Counter(cpu for _, cpu in ranks)),
        "mpi": _mpi_version(),
        "transport": comm.transport,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "horovod": package_version("horovod"),
        "numpy": np.__version__,
        **{name: v for name in _PACKAGES if (v := package_version(name))},
    }


def git_commit(project: str) -> str | None:
    """Return the commit of the checkout, with a "+" if files have changed, or None."""
    if not os.path.exists(os.path.join(project, ".git")):  # installed, perhaps in another checkout
        return None
    # This process runs the code of the checkout anyway, so git may trust a different owner.
    git = ["git", "-c", "safe.directory=*", "-C", project]
    command = [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)
        return done.stdout.strip() or None
    return None


def _mpi_version() -> str | None:
    """Return the version of the Open MPI that Horovod has loaded, or None."""
    text, length = ctypes.create_string_buffer(10_000), ctypes.c_int()
    with contextlib.suppress(OSError):
        library = ctypes.CDLL("libmpi.so.40", os.RTLD_NOLOAD | os.RTLD_NOW)
        library.MPI_Get_library_version(text, ctypes.byref(length))
    return text.value.decode().partition(",")[0] or None
