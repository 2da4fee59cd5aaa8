"""Start and end of a program on all ranks: one clear line for an error, one exit code.

A rank that fails alone would leave the others waiting for it, and N ranks that fail together
would say the same thing N times; both are settled here, so that no other module has to.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Callable, NoReturn, TypeVar

from lm.cli.flags import HelpRequested
from lm.distributed import launch
from lm.distributed.agreement import check_agreement
from lm.distributed.communicator import Communicator, OneProcess
from lm.distributed.signals import ignore_save_requests
from lm.distributed.watchdog import end_with_launcher
from lm.errors import EveryRankError, RunError, UserError
from lm.events.logs import may_be_gone, start_console

Job = TypeVar("Job")


def run(
    prepare: Callable[[Sequence[str], Communicator], Job],
    work: Callable[[Job, Communicator], None],
) -> NoReturn:
    """Join the other ranks, prepare, and if all ranks could, work; then exit.

    Args:
      prepare: Turns the command line into a job. May fail on one rank or on all: either way no
        rank starts to work.
      work: Does the job.
    """
    _start_output(launch.launched_rank())
    # TensorFlow's own start-up messages would bury the program's.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    ignore_save_requests()
    if launch.launched_size() > 1:
        end_with_launcher()
    comm = _connect(timeline=_has_flag("timeline"))
    job = _prepare_together(prepare, comm)
    try:
        work(job, comm)
    except EveryRankError as error:
        _end_together(comm, speaker=0, message=str(error), code=error.exit_code)
    except (UserError, RunError, OSError) as error:
        _end_alone(comm, str(error), code=2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        _end_alone(comm, "interrupted", code=130)
    except Exception:
        _end_alone(comm, traceback.format_exc(), code=1)
    comm.barrier()
    sys.exit(0)


def run_alone(work: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run a program of one process on its command line; then exit.

    Args:
      work: The program; its errors become one line and an exit code, as in `run`.
    """
    _start_output(0)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    comm = OneProcess()
    if launch.launched_size() > 1:
        _end_unconnected("this program is one process: start it without mpirun")
    try:
        work(sys.argv)
    except HelpRequested as text:
        _end_together(comm, speaker=0, message=str(text), code=0)
    except (UserError, RunError, OSError) as error:
        code = 2 if isinstance(error, UserError) else 1
        _end_together(comm, speaker=0, message=str(error), code=code)
    except KeyboardInterrupt:
        _end_together(comm, speaker=0, message="interrupted", code=130)
    sys.exit(0)


def _start_output(rank: int) -> None:
    # Texts are UTF-8 in and out, whatever the locale: a word leaves as it came in. What is no
    # UTF-8, in the name of a file, leaves as the bytes that it is.
    if sys.stdout:  # not where it was closed
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    start_console(rank)


def _has_flag(name: str) -> bool:
    # Flags are parsed once the ranks can tell each other what is wrong with them: too late here.
    return any(argument.lstrip("-").partition("=")[0] == name for argument in sys.argv[1:])


def _connect(timeline: bool) -> Communicator:
    try:
        return launch.connect(timeline)
    except UserError as error:
        _end_unconnected(str(error))


def _end_unconnected(message: str) -> NoReturn:
    # The ranks cannot talk to each other. The launcher kills all when the first one ends: leave
    # rank 0 the time to speak.
    if launch.launched_rank() == 0:
        _say(message)
    else:
        time.sleep(3)
    sys.exit(2)


def _prepare_together(prepare, comm: Communicator):
    job, failure = None, None
    try:
        job = prepare(sys.argv, comm)
    except HelpRequested as text:
        failure = {"message": str(text), "code": 0}
    except (UserError, RunError, OSError) as error:
        failure = {"message": str(error), "code": 2 if isinstance(error, UserError) else 1}
    except Exception:
        _end_alone(comm, traceback.format_exc(), code=1)
    failures = comm.gather(failure)
    failed = [rank for rank, found in enumerate(failures) if found]
    if failed:
        first = failures[failed[0]]
        alone = len(failed) < comm.size
        message = _located(comm, first["message"]) if alone else first["message"]
        _end_together(comm, failed[0], message, first["code"])
    try:
        check_agreement(comm.gather(job.facts()))
    except UserError as error:
        _end_together(comm, speaker=0, message=str(error), code=2)
    return job


def _end_together(comm: Communicator, speaker: int, message: str, code: int) -> NoReturn:
    if comm.rank == speaker:
        _say(message, code)
    # No rank exits before the line is out: the launcher kills the others when one does.
    comm.barrier()
    sys.exit(code)


def _end_alone(comm: Communicator, message: str, code: int) -> NoReturn:
    _say(_located(comm, message), code)
    # At once, without Horovod's shutdown, which waits for ranks that wait for this one.
    os._exit(code)


def _located(comm: Communicator, message: str) -> str:
    if comm.size == 1:
        return message
    return f"rank {comm.rank} on {socket.gethostname()}: {message}"


def _say(message: str, code: int = 2) -> None:
    stream = sys.stderr if code else sys.stdout
    if code:
        # Codes above 128 are signals': stopping for one is no error.
        message = f"lm: {'error: ' if code < 128 else ''}{message}"
    with may_be_gone(stream):
        print(message, file=stream, flush=True)
