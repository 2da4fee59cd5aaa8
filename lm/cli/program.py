"""Start and end of a command: one error line and one exit code, on any number of ranks.

If a rank fails, the other ranks do not wait for the failed rank. If all ranks fail with the same
error, only one rank reports the error.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

from lm.config import RunOptions
from lm.distributed import launch
from lm.distributed.agreement import on_all_ranks
from lm.distributed.communicator import Communicator
from lm.distributed.signals import Signals, stopped_by
from lm.distributed.supervisor import Supervisor
from lm.errors import ERROR, InfoRequested, ProgramExit, Stopped, UserError, first_line, printable
from lm.events.logs import may_be_gone, start_console
from lm.system import keep_freed_memory, use_huge_pages

Parsed = TypeVar("Parsed")

_KILLED_SECONDS = 10  # mpirun kills the ranks of a failed job within 4 seconds.
_START_SECONDS = 3600.0  # docs/distributed.md predicts 2,200 s for 4,096 ranks.


def run(
    parse: Callable[[Sequence[str]], Parsed],
    work: Callable[[Parsed, Communicator, Supervisor], None],
) -> NoReturn:
    """Parse the command line, connect the ranks, do the work, and exit.

    `parse` needs neither TensorFlow nor the other ranks, so that `--help` appears immediately.
    `work` runs on all ranks.
    """
    use_huge_pages()
    signals = _start(launch.launched_rank())
    if launch.launched_size() > 1 or launch.mpirun_above():
        launch.end_with_launcher()
    try:
        parsed, failure = _parse_or_defer(parse)
        with _start_limit():
            comm = launch.connect()
    except (ProgramExit, OSError) as error:
        _exit_unconnected(error)

    def work_together(supervisor: Supervisor) -> None:
        with on_all_ranks(comm):
            if failure:
                raise failure
        work(parsed, comm, supervisor)

    timeout = RunOptions().step_timeout_seconds
    _finish(comm, lambda: Supervisor(comm, timeout, signals), work_together)


def _parse_or_defer(
    parse: Callable[[Sequence[str]], Parsed],
) -> tuple[Parsed | None, Exception | None]:
    """Parse the command line, or return an error that all ranks report at the first exchange."""
    try:
        return parse(sys.argv), None
    except (ProgramExit, OSError) as error:
        if launch.launched_size() == 1 or isinstance(error, InfoRequested):
            raise
        return None, error  # The config file may be missing only on this host.


def run_alone(work: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run a command that is a single process, and exit."""
    _start(0)
    if launch.launched_size() > 1:
        _exit_unconnected(UserError("this command is a single process: start it without mpirun"))
    _finish(Communicator(), contextlib.nullcontext, lambda _: work(sys.argv))


def interruptible() -> contextlib.AbstractContextManager:
    """Let stop signals raise KeyboardInterrupt(number) in a block that does not use TensorFlow."""
    return contextlib.closing(Signals(exits=False))


def _start(rank: int) -> Signals:
    keep_freed_memory()
    # Print words in any locale, and file names that are not UTF-8, without changing their bytes.
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    start_console(rank)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Hide TensorFlow's startup messages.
    return Signals(speaks=rank == 0)


@contextlib.contextmanager
def _start_limit() -> Iterator[None]:
    """End this process if the ranks are not connected in time, because one of them hangs."""

    def end() -> None:
        _print_message(
            f"rank {launch.launched_rank()} on {socket.gethostname()}: the ranks are not connected"
            f" after {_START_SECONDS:.0f} s. Look for a rank that hangs, or set INTERFACE"
            " (docs/troubleshooting.md)",
            1,
        )
        os._exit(1)

    timer = threading.Timer(_START_SECONDS, end)
    timer.daemon = True
    if launch.launched_size() > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exit_unconnected(error: Exception) -> NoReturn:
    """Exit before the ranks are connected. Usually, all ranks have the same error."""
    code, is_rank_0 = _exit_code(error), launch.launched_rank() == 0
    if code and not is_rank_0:
        # If rank 0 fails too, the launcher kills this rank first. srun returns the status of a
        # killed rank instead of rank 0's exit code, so this rank exits with the same code.
        signal.set_wakeup_fd(-1)  # `Signals` would exit with the code of the signal.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(_KILLED_SECONDS)
    if code or is_rank_0:
        _print_message(str(error), code)
    sys.exit(code)


def _finish(
    comm: Communicator,
    supervise: Callable[[], contextlib.AbstractContextManager[Supervisor | None]],
    work: Callable[[Supervisor | None], None],
) -> NoReturn:
    code = 0
    try:
        with supervise() as supervisor:
            try:
                work(supervisor)
            except (ProgramExit, OSError) as error:
                code = _exit_code(error)
                if comm.size > 1 and not getattr(error, "on_every_rank", False):
                    _abort(comm, str(error), code)
                if comm.is_rank_0:
                    _print_message(str(error), code)
            if supervisor:  # The launcher kills all ranks when one exits: print the message first.
                with supervisor.exchange("the end"):
                    comm.barrier()
    except KeyboardInterrupt as interrupt:
        stopped = _stopped(interrupt)
        _abort(comm, str(stopped), stopped.exit_code)
    except Exception as error:
        _abort(comm, _describe(error), 1)
    # With --kill-on-bad-exit, srun ends all ranks when one of them fails, and returns the status of
    # a rank that a signal killed.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Nothing is left to save.
    sys.exit(code)


def _stopped(interrupt: KeyboardInterrupt) -> Stopped:
    """Return the error of a signal that stopped the program; see `Signals`."""
    number = interrupt.args[0] if interrupt.args else signal.SIGINT
    return Stopped(stopped_by(number), number)


def _describe(error: Exception) -> str:
    """Return the stack of an unexpected error, or one line if there is not enough memory."""
    # Compare the name: commands without TensorFlow must not import it for this.
    if isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError":
        return f"out of memory ({first_line(error)}): choose smaller sizes, such as the batch size"
    return traceback.format_exc()


def _abort(comm: Communicator, message: str, code: int) -> NoReturn:
    """Exit without Horovod's shutdown, which would wait for the other ranks."""
    with may_be_gone(sys.stdout):
        sys.stdout.flush()
    if comm.size > 1:
        message = f"rank {comm.rank} on {socket.gethostname()}: {message}"
    if code < 128 or comm.is_rank_0:  # A signal usually stops all ranks.
        _print_message(message, code)
    os._exit(code)


def _exit_code(error: Exception) -> int:
    return getattr(error, "exit_code", 1)


def _print_message(message: str, code: int) -> None:
    stream, prefix = (sys.stderr, ERROR) if code else (sys.stdout, "")
    if code > 128:  # A signal that stops a run is not an error.
        prefix = "lm: "
    text = prefix + printable(message, kept="\n\t")
    with may_be_gone(stream):
        print(text, file=stream, flush=True)
    if code:
        launch.repeat_after_mpirun(text)
