"""Destinations of log lines: the console, and the log files of the ranks (`--mpi_log`)."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from tqdm import tqdm

from lm.files import RetryingAppend

logger = logging.getLogger("lm")
_FORMATTER = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
_MAX_EARLY_LINES = 1000
# One lock for all files: a failing file logs an error, which goes to the other files. With one lock
# per file, two threads could each hold one lock and wait forever for the other.
_files_lock = threading.RLock()


@contextlib.contextmanager
def may_be_gone(stream: TextIO) -> Iterator[None]:
    """Let a write to the console fail: a closed terminal must not end a run.

    Args:
      stream: sys.stdout or sys.stderr. After the first failure, it leads to /dev/null.
    """
    try:
        yield
    except OSError:
        # The buffered text would fail again when Python exits.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _ConsoleHandler(logging.Handler):
    """Writes lines above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        with may_be_gone(sys.stderr):
            tqdm.write(self.format(record), file=sys.stderr)


class _FileHandler(logging.Handler):
    """Writes lines to a file, whose disk may be full."""

    def __init__(self, path: str):
        super().__init__()
        self._file = RetryingAppend(path)
        self.setFormatter(_FORMATTER)

    def createLock(self) -> None:
        self.lock = _files_lock  # logging holds it during `emit`

    def emit(self, record: logging.LogRecord) -> None:
        self.write([self.format(record)])

    def close(self) -> None:
        self._file.close()
        super().close()

    def write(self, lines: Sequence[str]) -> None:
        """Write formatted lines."""
        text = "".join(f"{line}\n" for line in lines)
        with self.lock:
            self._file.write(text.encode("utf-8", "backslashreplace"))


class _Buffer(logging.Handler):
    """Keeps formatted lines in memory.

    Args:
      lines: The first lines.
      limit: The number of lines to keep; None for all.
    """

    def __init__(self, lines: Sequence[str] = (), limit: int | None = None):
        super().__init__()
        self._lines = collections.deque(lines, maxlen=limit)
        self.setFormatter(_FORMATTER)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))

    def take(self) -> list[str]:
        """Remove the lines and return them."""
        with self.lock:
            lines = list(self._lines)
            self._lines.clear()
        return lines


# The lines before the log files are open. Commands without log files never take them.
_early = _Buffer(limit=_MAX_EARLY_LINES)


def start_console(rank: int) -> None:
    """Send the log lines of rank 0, and the errors of all ranks, to stderr without timestamps."""
    handler = _ConsoleHandler()
    # Most warnings concern the corpus or the network, and 1,000 ranks would repeat them.
    handler.setLevel(logging.ERROR if rank else logging.INFO)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.addHandler(_early)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def worker_path(path: str, rank: int) -> str:
    """Return the log file of a rank, named after rank 0's: log.txt, log.1.txt, log.2.txt."""
    stem, extension = os.path.splitext(path)
    return f"{stem}.{rank}{extension}" if rank else path


class LogFiles:
    """The log files of this rank. They include the lines logged before the files were opened.

    Args:
      paths: The files of rank 0.
      mode: "master": only rank 0 writes. "workers": each rank writes its own files, named by
        `worker_path`. "collect": the ranks keep their lines until `collect`, and rank 0 writes
        them with a prefix. Lines since the last `collect` are lost if the job is killed.
      rank: This rank.

    Raises:
      OSError: If a file cannot be opened.
    """

    def __init__(self, paths: Sequence[str], mode: str, rank: int):
        self._collects = mode == "collect"
        files: list[_FileHandler] = []
        if rank == 0 or mode == "workers":
            for path in paths:  # on another host, the run directory may not exist
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            files = [_FileHandler(worker_path(path, rank)) for path in paths]
        logger.removeHandler(_early)
        early = _early.take()
        self._files, self._buffer = files, _Buffer(early if rank else ())
        for file in files:
            file.write(early)
            logger.addHandler(file)
        if rank and self._collects:
            logger.addHandler(self._buffer)
        if logger.level == logging.NOTSET:  # the caller did not configure logging
            logger.setLevel(logging.INFO)

    def write(self, message: str) -> None:
        """Write an error line to the files only: the console shows it when the program ends."""
        record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None)
        for file in self._files:
            file.handle(record)

    def collect(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Write the lines of all ranks to rank 0's files in mode "collect".

        All ranks must call it at the same point.

        Args:
          gather: Returns the argument of each rank, by rank, like `Communicator.gather`.
        """
        if not self._collects:
            return
        by_rank = gather(self._buffer.take())
        for file in self._files:
            for rank, lines in enumerate(by_rank):
                file.write([f"[rank {rank}] {line}" for line in lines])

    def close(self) -> None:
        """Stop logging to the files."""
        logger.removeHandler(self._buffer)
        for file in self._files:
            logger.removeHandler(file)
            file.close()
