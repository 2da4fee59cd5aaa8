"""Where log lines go: the console, and files of one rank or of all (`--mpi_log`)."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from tqdm import tqdm

from lm.files import PatientFile

logger = logging.getLogger("lm")
_FORMATTER = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
# One for all files: a file that finds no room says so in the others, and two threads that each held
# one file and waited for the other's would wait for ever.
_files_lock = threading.RLock()


@contextlib.contextmanager
def may_be_gone(stream: TextIO) -> Iterator[None]:
    """Let a write to the console fail: a closed terminal must not end a run, nor its last save.

    Args:
      stream: sys.stdout or sys.stderr; from its first failure on it leads nowhere.
    """
    try:
        yield
    except OSError:
        # Not only this write: what is still buffered would fail again when Python exits.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _ConsoleHandler(logging.Handler):
    """Writes lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        with may_be_gone(sys.stderr):
            tqdm.write(self.format(record), file=sys.stderr)


class _FileHandler(logging.Handler):
    """Writes lines to a file, which may be on a full disk."""

    def __init__(self, path: str):
        super().__init__()
        self._file = PatientFile(path)
        self.setFormatter(_FORMATTER)

    def createLock(self) -> None:
        """Called by logging, which holds the lock in `emit`."""
        self.lock = _files_lock

    def emit(self, record: logging.LogRecord) -> None:
        self.write([self.format(record)])

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def write(self, lines: Sequence[str]) -> None:
        """Write lines that are formatted."""
        text = "".join(f"{line}\n" for line in lines)
        with self.lock:  # `collect` comes here past logging, the writer of checkpoints through it
            self._file.write(text.encode("utf-8", "backslashreplace"))


class _Keep(logging.handlers.BufferingHandler):
    """Keeps lines until somebody takes them."""

    def take(self) -> list[str]:
        """Return the lines kept since the last call."""
        records, self.buffer = self.buffer, []
        return [_FORMATTER.format(record) for record in records]


# What was said before the run's directory was known and, where rank 0 collects the lines of the
# others, what they have said since.
_unwritten = _Keep(math.inf)


def start_console(rank: int) -> None:
    """Send rank 0's log lines, and all ranks' errors, to stderr, without time stamps."""
    handler = _ConsoleHandler()
    # Ranks warn of the same corpus and the same network: 1,000 of them would say it 1,000 times.
    handler.setLevel(logging.ERROR if rank else logging.INFO)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.addHandler(_unwritten)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def worker_path(path: str, rank: int) -> str:
    """Return the file of a rank beside rank 0's: log.txt, log.1.txt, log.2.txt."""
    stem, extension = os.path.splitext(path)
    return f"{stem}.{rank}{extension}" if rank else path


class LogFiles:
    """This rank's part in a run's log files, from the lines before it was made on.

    Args:
      paths: The files, as rank 0 names them.
      mode: master: rank 0 alone writes. workers: each rank writes files of its own, named by
        `worker_path`. collect: the ranks keep their lines until `collect`, when rank 0 writes
        them, each with its rank; lines since the last `collect` are lost when a job is killed.
      rank: This rank.

    Raises:
      OSError: A file cannot be opened.
    """

    def __init__(self, paths: Sequence[str], mode: str, rank: int):
        self._collects = mode == "collect"
        self._files: list[_FileHandler] = []
        if rank == 0 or mode == "workers":
            for path in paths:  # rank 0 alone has made the run's directory: hosts may share none
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            # All of them before the first is in use: one that cannot be opened leaves none behind.
            self._files = [_FileHandler(worker_path(path, rank)) for path in paths]
            early = _unwritten.take()
            for handler in self._files:
                handler.write(early)
                logger.addHandler(handler)
        if rank and self._collects:
            logger.addHandler(_unwritten)
        else:
            logger.removeHandler(_unwritten)
        if logger.level == logging.NOTSET:  # no command, but a caller that has set up no logging
            logger.setLevel(logging.INFO)

    def write(self, message: str) -> None:
        """Write what the console is told when the files are closed."""
        record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None)
        for file in self._files:
            file.handle(record)

    def close(self) -> None:
        """Write no more lines."""
        logger.removeHandler(_unwritten)
        for file in self._files:
            logger.removeHandler(file)
            file.close()

    def collect(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Bring the ranks' lines to rank 0's files; all ranks must call it together.

        Args:
          gather: Returns the argument of each rank, by rank, as `Communicator.gather`.
        """
        if not self._collects:
            return
        by_rank = gather(_unwritten.take())
        for file in self._files:
            for rank, lines in enumerate(by_rank):
                file.write([f"[rank {rank}] {line}" for line in lines])
