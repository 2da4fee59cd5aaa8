"""Signals as requests: SIGTERM, SIGINT, SIGHUP and SIGUSR2 stop the run, SIGUSR1 saves it.

SIGUSR2 replaces SIGTERM for jobs under mpirun, which interprets SIGTERM as its own: Open MPI 4.1
forwards it to the ranks only after odls_base_sigkill_timeout, and kills them after the same time
again. Open MPI forwards SIGUSR1 and SIGUSR2 immediately, and waits.
"""

import _thread
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from lm import logger
from lm.distributed.launch import repeat_after_mpirun
from lm.system import act_at_stop

_STOP = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR2: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # the terminal was closed
}
# The ranks receive one SIGUSR1 at slightly different steps, and must save only once.
_SAME_REQUEST_SECONDS = 2.0
_END_SECONDS = 3.0  # time limit for the last actions of a process


def stopped_by(number: int) -> str:
    return f"stopped by {signal.Signals(number).name}"


class Signals:
    """Records the requests of signals until it is closed.

    If `exits` is true, a stop signal before `defer` is called ends the process, and so does a
    second SIGINT. Otherwise, for example in a notebook, these signals raise
    KeyboardInterrupt(number) in the main thread. TensorFlow's C code may lose or print such an
    exception.

    A thread receives the signals, because Python runs a handler only after the main thread returns
    from C code, and a rank that waits for a dead rank never returns. Outside the main thread,
    Python does not allow handlers, and no signals are recorded. `speaks` is whether this rank
    acknowledges stop signals on the console.
    """

    def __init__(self, speaks: bool = True, exits: bool = True) -> None:
        self.stop = 0  # number of the first stop signal, or 0
        self.save = False  # whether a save was requested since the last save
        self._speaks, self._exits, self._is_deferred = speaks, exits, False
        self._saved_at = -_SAME_REQUEST_SECONDS
        self._num_interrupts, self._num_handled = 0, 0
        self._interrupt = 0  # number of the last signal that raised KeyboardInterrupt, or 0
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._open()

    def _open(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        descriptor = self._writer.fileno()
        self._previous_wakeup = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        for number in (*_STOP, signal.SIGUSR1):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup
            self._previous[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the previous signal handlers."""
        if not self._previous:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not installed by Python
        signal.set_wakeup_fd(self._previous_wakeup)
        self._writer.close()  # this ends the thread
        self._thread.join()
        self._reader.close()

    @contextlib.contextmanager
    def as_interrupt(self) -> Iterator[None]:
        """Raise KeyboardInterrupt again if TensorFlow's C code turns it into a different error."""
        try:
            yield
        except Exception:
            if self._interrupt and not self._is_deferred:
                raise KeyboardInterrupt(self._interrupt) from None
            raise

    def defer(self) -> None:
        """From now on, let stop signals wait until the caller reads `stop`, and saves."""
        self._is_deferred = True

    def saved(self) -> None:
        """Clear the requests to save."""
        self.save, self._saved_at = False, time.monotonic()

    def _handle(self, number: int, _: FrameType | None) -> None:
        # The thread receives the signal through the wakeup descriptor.
        if number not in _STOP:
            return
        self._num_handled += 1
        if self._exits:
            if not self._is_deferred:
                # Wait for the end of the process: the work would report missing files.
                time.sleep(2 * _END_SECONDS)
        elif not self._is_deferred or self._num_handled > 1:
            self._interrupt = int(_STOP[number])
            raise KeyboardInterrupt(self._interrupt)

    def _read(self) -> None:
        # The programs that read stdout and stderr may receive the same signal, and end first.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        while numbers := self._reader.recv(64):
            for number in numbers:
                self._note(number)

    def _note(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self.save = time.monotonic() - self._saved_at > _SAME_REQUEST_SECONDS
        elif number in _STOP:
            is_first, self.stop = not self.stop, self.stop or int(_STOP[number])
            self._num_interrupts += number == signal.SIGINT
            if self._num_interrupts == 2 and self._exits:
                self._exit("interrupted twice: stopping immediately")
            if is_first and self._is_deferred:
                # After the failure of a rank, mpirun and srun send SIGTERM to the other ranks.
                note = ", if all ranks complete it"
                if number == signal.SIGINT:
                    note = "; Ctrl-C again ends without saving"
                self._print(f"stopping after this step and saving{note}")
            elif is_first and self._exits:
                self._exit(stopped_by(self.stop))

    def _exit(self, message: str) -> NoReturn:
        # A disk may hang, and the main thread may hold the lock of stdout, or of `threading`.
        ended = threading.Event()
        with contextlib.suppress(RuntimeError):  # Python itself is ending.
            _thread.start_new_thread(self._end, (ended,))
            ended.wait(_END_SECONDS)
        self._print(message)
        if self._speaks:
            repeat_after_mpirun(f"lm: {message}")
        os._exit(128 + self.stop)

    def _end(self, ended: threading.Event) -> None:
        if not self._is_deferred:  # Otherwise, a checkpoint may be complete soon.
            act_at_stop()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        ended.set()

    def _print(self, message: str) -> None:
        if not self._exits:  # A notebook does not show what is written to the file descriptor.
            logger.warning("%s", message)
        elif self._speaks:
            # Do not use print(), because the main thread may hold its lock. The terminal may be
            # closed.
            with contextlib.suppress(OSError):
                newline = "\n" * os.isatty(sys.stderr.fileno())  # below the progress bar
                os.write(sys.stderr.fileno(), f"{newline}lm: {message}\n".encode())
