"""Destinations of log lines: the console, and the log files of the ranks (`--mpi_log`)."""

import collections
import contextlib
import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

from tqdm import tqdm

from lm import logger
from lm.errors import error_class, printable
from lm.events.append import RetryingAppend

_MAX_EARLY_LINES = 1000
_MOMENTARY = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN}  # errors of a console that is a file


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), kept="\n\t")


_FORMATTER = _Formatter("%(asctime)s %(levelname)s %(message)s")


@contextlib.contextmanager
def may_be_gone(stream: TextIO) -> Iterator[None]:
    """Ignore a failed write to the console, because a closed terminal must not end a run."""
    try:
        yield
    except OSError as error:
        if error.errno in _MOMENTARY:
            return
        # Redirect the stream: otherwise, the buffered text would fail again when Python exits.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class _ConsoleHandler(logging.Handler):
    """Writes lines above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        with may_be_gone(sys.stderr):
            tqdm.write(self.format(record), file=sys.stderr)


class _EarlyLines(logging.Handler):
    """Keeps the last lines until the log files are open. Most commands never open log files."""

    def __init__(self):
        super().__init__()
        self.lines = collections.deque(maxlen=_MAX_EARLY_LINES)
        self.setFormatter(_FORMATTER)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


_early = _EarlyLines()


def keep_early_lines() -> None:
    """Keep the lines from now on for the log files of the next run."""
    _early.lines.clear()
    logger.addHandler(_early)


def start_console(rank: int) -> None:
    """Send the log lines of rank 0, and the errors of all ranks, to stderr without timestamps."""
    handler = _ConsoleHandler()
    # Most warnings concern the corpus or the network, so all ranks would repeat them.
    handler.setLevel(logging.ERROR if rank else logging.INFO)
    handler.setFormatter(_Formatter("%(message)s"))
    logger.addHandler(handler)
    keep_early_lines()
    logger.setLevel(logging.INFO)
    logger.propagate = False


def worker_path(path: str, rank: int) -> str:
    """Return the path of a rank's log file: log.txt for rank 0, then log.1.txt, log.2.txt."""
    stem, extension = os.path.splitext(path)
    return f"{stem}.{rank}{extension}" if rank else path


def _open(path: str) -> RetryingAppend:
    try:
        # The run directory may exist only on the host of rank 0.
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        return RetryingAppend(path)
    except OSError as error:
        raise error_class(error)(
            f"cannot write the log {path} ({error.strerror}); check --log_path and --output_dir"
        ) from error


class LogFiles(logging.Handler):
    """The log files of this rank, including the lines that were logged before they were opened.

    Args:
      paths: The files of rank 0.
      mode: "master": only rank 0 writes. "workers": each rank writes its own files, named by
        `worker_path`. "collect": the ranks keep their lines until `collect`, and rank 0 writes
        them with a prefix. Lines since the last `collect` are lost if the job is killed.
      rank: This rank.
    """

    def __init__(self, paths: Sequence[str], mode: str, rank: int):
        super().__init__()
        self.setFormatter(_FORMATTER)
        self._collects, self._files, self._kept = mode == "collect", [], []
        if rank == 0 or mode == "workers":
            self._files = [_open(worker_path(path, rank)) for path in paths]
        logger.removeHandler(_early)
        self._append(_early.lines)
        _early.lines.clear()
        logger.addHandler(self)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self._append([self.format(record)])

    def write(self, message: str) -> None:
        """Write an error only to the files. The console shows errors when the program ends."""
        self.handle(logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None))

    def collect(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Write the lines of all ranks to the files of rank 0 in mode "collect".

        All ranks must call this method at the same point, with `Communicator.gather`.
        """
        if not self._collects:
            return
        with self.lock:
            kept, self._kept = self._kept, []
        by_rank = gather(kept)
        if self._files:
            self._append(
                f"[rank {rank}] {line}" for rank, lines in enumerate(by_rank) for line in lines
            )

    def close(self) -> None:
        """Stop logging to the files."""
        logger.removeHandler(self)
        for file in self._files:
            file.close()
        super().close()

    def _append(self, lines: Iterable[str]) -> None:
        with self.lock:
            if self._collects and not self._files:
                self._kept.extend(lines)
            text = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
            for file in self._files:
                file.write(text)
