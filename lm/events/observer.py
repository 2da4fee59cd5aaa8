"""A program that receives the events of a run (`--on_event`)."""

import contextlib
import queue
import subprocess
import threading

from lm import logger
from lm.errors import error_class
from lm.files import no_link
from lm.system import environment_without_launcher

_MAX_WAITING = 1000  # events
_END_SECONDS = 10.0


class Observer:
    """Sends each event as a line to the standard input of a shell command.

    The command cannot slow or end the training: a thread writes the lines, and events are lost if
    the command is slow or has ended. There is only one warning per run. The output of the command
    is appended to `output_path`.
    """

    def __init__(self, command: str, output_path: str, end_seconds: float = _END_SECONDS):
        self._output_path, self._end_seconds, self._is_failed = output_path, end_seconds, False
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
        # If the command inherited this rank's output, mpirun would wait for the command to end.
        # The command has its own session, so that Ctrl-C does not end it before the last event.
        try:
            output = open(output_path, "ab", opener=no_link)
        except OSError as error:
            raise error_class(error)(f"cannot write {output_path}: {error.strerror}") from error
        with output:
            self._process = subprocess.Popen(
                command, shell=True, stdin=subprocess.PIPE, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
                env=environment_without_launcher(),
            )  # fmt: skip
        self._thread = threading.Thread(target=self._write_lines, name="observer", daemon=True)
        self._thread.start()

    def send(self, line: bytes) -> None:
        """Queue a line for the command."""
        if not self._is_failed:
            try:
                self._lines.put_nowait(line)
            except queue.Full:
                self._fail(f"has not read {_MAX_WAITING:,} events")

    def close(self) -> None:
        """Wait a short time until the command has read all lines and has ended."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(self._end_seconds)
        if self._thread.is_alive():
            self._fail(f"is still running {self._end_seconds:.0f} s after the end of the run")

    def _write_lines(self) -> None:
        is_complete = False
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while line := self._lines.get():
                pipe.write(line)
                pipe.flush()
            is_complete = True
        code = self._process.wait()
        if code or not is_complete:
            self._fail(f"ended with exit code {code}")

    def _fail(self, reason: str) -> None:
        if not self._is_failed:
            self._is_failed = True
            logger.warning(
                "the command of --on_event %s, so it gets no more events: see %s",
                reason,
                self._output_path,
            )
