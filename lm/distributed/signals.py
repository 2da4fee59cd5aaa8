"""Signals as requests: SIGTERM, SIGINT, SIGHUP and SIGUSR2 ask to stop, SIGUSR1 to save.

SIGUSR2 stands for SIGTERM where that must pass through mpirun, which takes a SIGTERM as its own:
Open MPI 4.1 lets odls_base_sigkill_timeout go by before the ranks get it, and kills them when
as much time has passed again. SIGUSR1 and SIGUSR2 it hands on at once, and waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

_STOP = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR2: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # the terminal has been closed
}
# Ranks get one SIGUSR1 at slightly different steps, and must not save once for each of them.
_SAME_REQUEST_SECONDS = 2.0


def ignore_save_requests() -> None:
    """Let a SIGUSR1 that comes before there is anything to save do no harm; it would kill."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Signals:
    """Remembers what signals have asked for, until it is closed.

    A thread reads them: Python runs a handler only when the main thread is back from C, and a
    rank that waits for a dead one never is. Made on another thread than the main one, where Python
    allows no handlers, it hears nothing.
    """

    def __init__(self) -> None:
        self.stop = 0  # the number of the first signal that asked this rank to stop
        self.save = False  # whether it has been asked to save since its last save
        self._saved_at = -_SAME_REQUEST_SECONDS
        self._num_interrupts = 0
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._open()

    def _open(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        descriptor = self._writer.fileno()
        self._wakeup_before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        for number in (*_STOP, signal.SIGUSR1):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup
            # The wakeup descriptor has it already.
            self._before[number] = signal.signal(number, lambda *_: None)
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the signals back to whoever had them before."""
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set by Python
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()  # which ends the thread
        self._thread.join()
        self._reader.close()

    def saved(self) -> None:
        """Forget the requests to save."""
        self.save, self._saved_at = False, time.monotonic()

    def _read(self) -> None:
        while numbers := self._reader.recv(64):
            for number in numbers:
                self._note(number)

    def _note(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self.save = time.monotonic() - self._saved_at > _SAME_REQUEST_SECONDS
        elif number in _STOP:
            self.stop = self.stop or int(_STOP[number])
            self._num_interrupts += number == signal.SIGINT
            if self._num_interrupts == 2:
                with contextlib.suppress(OSError):
                    os.write(sys.stderr.fileno(), b"lm: interrupted twice: stopping at once\n")
                os._exit(128 + signal.SIGINT)
