"""When to save, and the writing of checkpoints while the training goes on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Optional

import numpy as np

from lm.checkpoint import choice
from lm.checkpoint import format as checkpoint
from lm.checkpoint.manifest import Manifest
from lm.errors import RunError

logger = logging.getLogger("lm")


class Saver:
    """Writes the checkpoints of a run in the background, one at a time; for rank 0.

    A checkpoint that cannot be written is reported and the training goes on: the one before it
    is intact, and the next may find room.

    Args:
      run_dir: The run's output_dir.
      keep: How many of the last checkpoints are kept, besides the best.
      every_steps: Save when the step is a multiple of this; None for never.
      every_minutes: Save when this many minutes have passed since the last save.
      sync_events: Brings the run's events to the disk. Before each save: a run that goes on from
        the checkpoint has the events of its steps, even after a power cut.
    """

    def __init__(
        self,
        run_dir: str,
        keep: int,
        every_steps: Optional[int] = None,
        every_minutes: float = math.inf,
        sync_events: Callable[[], None] = lambda: None,
    ):
        self._run_dir, self._keep, self._sync_events = run_dir, keep, sync_events
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._saved_at = time.monotonic()
        self._overdue = False
        self._thread: Optional[threading.Thread] = None
        self.failure: Optional[RunError] = None  # of the last save

    def is_due(self, step: int) -> bool:
        """Tell whether to save at this step; to be asked once at each.

        A save that comes due while another is being written is put off, not waited for.
        """
        if self._every_steps and step % self._every_steps == 0:
            self._overdue = True
        if time.monotonic() - self._saved_at > 60 * self._every_minutes:
            self._overdue = True
        return self._overdue and not self.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: Optional[float] = None) -> None:
        """Wait until nothing is being written, for so long at most."""
        if self._thread:
            self._thread.join(seconds)

    def start(self, arrays: Mapping[str, np.ndarray], manifest: Manifest) -> None:
        """Begin to write a checkpoint; nothing else may be being written.

        Args:
          arrays: What it holds, by name; not to be changed any more.
          manifest: Without `files`.
        """
        assert not self.is_busy
        self._overdue, self._saved_at = False, time.monotonic()
        self._thread = threading.Thread(
            target=self._write, args=(arrays, manifest), name="saver", daemon=True
        )
        self._thread.start()

    def _write(self, arrays: Mapping[str, np.ndarray], manifest: Manifest) -> None:
        try:
            self._sync_events()
            checkpoint.save(self._run_dir, arrays, manifest)
            if self.failure:
                logger.info("checkpoints can be written again")
            self.failure = None
        except Exception as error:
            # Whatever it is, it must not end this thread in silence.
            failed_before = self.failure is not None
            self.failure = error if isinstance(error, RunError) else RunError(repr(error))
            if not failed_before:  # a full disk stays full: said once, not at each save
                logger.warning("%s; training goes on", self.failure)
            return
        try:
            choice.prune(self._run_dir, self._keep)
        except Exception as error:  # the next save tries again
            logger.warning("old checkpoints are not removed: %s", error)
