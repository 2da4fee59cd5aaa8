"""Data-parallel language models with TensorFlow graphs, Horovod and MPI; LSTMs on PTB built in."""

import signal
import sys

# Python imports this package before the command in `python -m lm.train`. Tools such as pip name the
# command lm-train.
_is_command = sys.argv[0] == "-m" or "/bin/lm-" in sys.argv[0]
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # While modules are imported, Ctrl-C ends the process without a stack trace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import importlib.util  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402

__version__ = "0.1.0"

logger = logging.getLogger("lm")  # lm/events/logs.py opens its destinations


def _check_packages() -> None:
    """End a command that was started with a Python in which this project is not installed."""
    for name in ("numpy", "tensorflow", "tqdm"):
        if importlib.util.find_spec(name) is None:
            if os.environ.get("OMPI_COMM_WORLD_RANK", "0") != "0":
                time.sleep(10)  # If rank 0 fails too, mpirun kills this rank first.
            print(
                f"lm: error: {sys.executable} on {socket.gethostname()} has no package {name}:"
                " run `source .venv/bin/activate` in the project's directory, or install the"
                " package (docs/installation.md)",
                file=sys.stderr,
            )
            sys.exit(2)


if _is_command:
    _check_packages()
