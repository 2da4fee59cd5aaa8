"""The progress of reading: a bar on a terminal, and otherwise log lines."""

from __future__ import annotations

import contextlib
import logging
import time

import tqdm

_LOG_SECONDS = 10.0

logger = logging.getLogger("lm")


class _Bar(tqdm.tqdm):
    """A progress bar without tqdm's monitor thread. That thread would outlive the run."""

    monitor_interval = 0


class ReadProgress:
    """The number of bytes read so far.

    Only rank 0 writes log lines to the console.

    Args:
      activity: The activity, such as "downloading".
      total: The total number of bytes, or None or 0 if it is unknown.
    """

    def __init__(self, activity: str, total: int | None):
        self._activity, self._total = activity, total
        # disable=None: show no bar if stderr is not a terminal, as in the log of a batch job.
        # mpirun connects the ranks to pipes, so only a process without mpirun shows a bar.
        self._bar = _Bar(
            total=total or None, desc=activity, unit="B", unit_scale=True, leave=False, disable=None
        )
        self._done, self._logged_at = 0, time.monotonic()

    def update(self, done: int) -> None:
        """Show the number of bytes that have been read so far."""
        # A closed terminal must not end a job.
        with contextlib.suppress(OSError):
            self._bar.update(done - self._done)
        self._done = done
        now = time.monotonic()
        if self._bar.disable and now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            of_total = f" of {self._total / 1e6:,.0f}" if self._total else ""
            logger.info(f"{self._activity}: {done / 1e6:,.0f}{of_total} MB")

    def close(self) -> None:
        """Remove the bar."""
        with contextlib.suppress(OSError):
            self._bar.close()
