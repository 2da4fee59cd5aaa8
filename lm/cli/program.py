"""Start and end of a program on all ranks: one clear line for an error, one exit code.

A rank that fails alone would leave the others waiting for it, and N ranks that fail together
would say the same thing N times; both are settled here, so that no other module has to.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Callable, NoReturn, TypeVar

from lm.distributed import launch
from lm.distributed.agreement import raise_on_all_ranks
from lm.distributed.communicator import Communicator, OneProcess
from lm.distributed.signals import ignore_save_requests
from lm.errors import ERROR, InfoRequested, ProgramExit, Stopped, UserError
from lm.events.logs import may_be_gone, start_console
from lm.system import keep_freed_memory

Parsed = TypeVar("Parsed")

# Within them mpirun, which waits for 4, has killed the ranks of a job that has failed.
_KILLED_SECONDS = 10
_INTERRUPTED = Stopped("interrupted", signal.SIGINT)


def run(
    parse: Callable[[Sequence[str]], Parsed],
    work: Callable[[Parsed, Communicator], None],
) -> NoReturn:
    """Parse the command line, join the other ranks and work; then exit.

    Args:
      parse: Turns the command line into what is to be done. It needs neither the other ranks nor
        TensorFlow, so that `--help`, and on one process a typing error, answer at once.
      work: Does it, on all ranks; its first exchange is that of `raise_on_all_ranks`.
    """
    _start(launch.launched_rank())
    if launch.launched_size() > 1 or launch.mpirun_above():
        launch.end_with_launcher()
    parsed, failure = None, None
    try:
        parsed = parse(sys.argv)
    except (ProgramExit, OSError) as error:
        failure = error
    except KeyboardInterrupt:
        _end_unconnected(_INTERRUPTED)
    if failure and (launch.launched_size() == 1 or isinstance(failure, InfoRequested)):
        _end_unconnected(failure)  # at once: what ranks need to exchange takes seconds to import
    try:
        comm = launch.connect()
    except (ProgramExit, OSError) as error:
        _end_unconnected(error)
    except KeyboardInterrupt:
        _end_unconnected(_INTERRUPTED)

    def fail() -> NoReturn:
        raise failure

    # On this rank alone, if its host lacks a file that --config names: the others are told where
    # they first meet.
    _finish(comm, lambda: raise_on_all_ranks(comm, fail) if failure else work(parsed, comm))


def run_alone(work: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run a program of one process on its command line; then exit.

    Args:
      work: The program; its errors become one line and an exit code, as in `run`.
    """
    _start(0)
    if launch.launched_size() > 1:
        _end_unconnected(UserError("this program is one process: start it without mpirun"))
    _finish(OneProcess(), lambda: work(sys.argv))


def _start(rank: int) -> None:
    _open_closed_streams()
    keep_freed_memory()  # before NumPy and TensorFlow start threads
    # Texts are UTF-8 in and out, whatever the locale: a word leaves as it came in. What is no
    # UTF-8, in the name of a file, leaves as the bytes that it is.
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    start_console(rank)
    # TensorFlow's own start-up messages would bury the program's.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    ignore_save_requests()


def _open_closed_streams() -> None:
    # Else the first file that is opened gets the number of stderr, and what C++ says goes into it.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", errors="backslashreplace", closefd=False)


def _end_unconnected(error: Exception) -> NoReturn:
    # The ranks cannot talk to each other, and most likely all meet the same error. The launcher
    # kills all when the first one ends: rank 0 speaks, and another one if rank 0 is well.
    code = _exit_code(error)
    if code and launch.launched_rank() != 0:
        time.sleep(_KILLED_SECONDS)
    if code or launch.launched_rank() == 0:
        _say(str(error), code)
    sys.exit(code)


def _finish(comm: Communicator, work: Callable[[], None]) -> NoReturn:
    try:
        work()
    except (ProgramExit, OSError) as error:
        if comm.size > 1 and not getattr(error, "on_every_rank", False):
            _end_alone(comm, str(error), _exit_code(error))
        if comm.is_rank_0:
            _say(str(error), _exit_code(error))
        # No rank exits before the line is out: the launcher kills the others when one does.
        comm.barrier()
        sys.exit(_exit_code(error))
    except KeyboardInterrupt:
        _end_alone(comm, str(_INTERRUPTED), _INTERRUPTED.exit_code)
    except Exception:
        _end_alone(comm, traceback.format_exc(), 1)
    comm.barrier()
    sys.exit(0)


def _end_alone(comm: Communicator, message: str, code: int) -> NoReturn:
    with may_be_gone(sys.stdout):
        sys.stdout.flush()
    if comm.size > 1:
        message = f"rank {comm.rank} on {socket.gethostname()}: {message}"
    _say(message, code)
    # At once, without Horovod's shutdown, which waits for ranks that wait for this one.
    os._exit(code)


def _exit_code(error: Exception) -> int:
    return error.exit_code if isinstance(error, ProgramExit) else 1


def _say(message: str, code: int) -> None:
    stream = sys.stderr if code else sys.stdout
    if code:
        # Codes above 128 are signals': stopping for one is no error.
        message = f"{ERROR if code < 128 else 'lm: '}{message}"
    with may_be_gone(stream):
        print(message, file=stream, flush=True)
