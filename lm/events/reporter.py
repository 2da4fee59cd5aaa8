"""What a run tells: `metrics.jsonl`, TensorBoard and its progress.

A run has events (numbers, for programs) and log lines (sentences, for people). Events go to
`metrics.jsonl` and TensorBoard, on rank 0 alone; log lines where `lm/events/logs.py` sends them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

from tqdm import tqdm

from lm import run_files
from lm.errors import ProgramExit, RunError, Stopped
from lm.events.logs import LogFiles, may_be_gone
from lm.events.tensorboard import TensorBoardWriter
from lm.files import PatientFile

logger = logging.getLogger("lm")


class Reporter:
    """Writes a run's events and log lines on rank 0; on the other ranks it writes nothing.

    Args:
      output_dir: The run's directory, which exists; None on all ranks but 0, so that they
        cannot corrupt its files.
      tensorboard: Whether to write TensorBoard's event files too.
    """

    def __init__(self, output_dir: Optional[str], tensorboard: bool = False):
        self.output_dir = output_dir
        self._metrics, self._tensorboard, self._logs = None, None, None
        if output_dir:
            path = os.path.join(output_dir, run_files.METRICS)
            self._metrics = PatientFile(path)
            if tensorboard:
                self._tensorboard = TensorBoardWriter(
                    os.path.join(output_dir, run_files.TENSORBOARD)
                )

    def open_logs(self, paths: Sequence[str], mode: str, rank: int) -> None:
        """Start this rank's log files; the arguments are those of `LogFiles`."""
        self._logs = LogFiles(paths, mode, rank)

    def collect_logs(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Bring the ranks' lines to rank 0, if `--mpi_log collect`; all ranks call it together."""
        self._logs.collect(gather)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one JSON object to metrics.jsonl, and its numbers to TensorBoard."""
        if self._metrics:
            # JSON has no NaN and no infinity, and null is no number: such a field is left out.
            finite = {name: value for name, value in fields.items() if _is_json(value)}
            self._metrics.write(json.dumps({"event": kind, **finite}).encode() + b"\n")
        if self._tensorboard:
            self._tensorboard.write(kind, fields)

    def sync(self) -> None:
        """Bring the events so far to the disk, so that a power cut does not take them."""
        if self._metrics:
            self._metrics.sync()

    def describe(self, settings: dict[str, Any]) -> None:
        """Show the run's settings in TensorBoard."""
        if self._tensorboard:
            self._tensorboard.describe(settings)

    def progress(self, epoch: int, done: int, total: int) -> Progress:
        """Start showing the progress of an epoch of `total` steps, `done` of them done."""
        return Progress(self, epoch, done, total)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: Optional[type], error: Optional[Exception], _: object) -> None:
        """End the run's report; the last line of its log is why it has ended.

        Raises:
          RunError: There was no room for all events; not in the place of another error.
        """
        if isinstance(error, ProgramExit) and self._logs:
            self._logs.write(str(error))
        self._report_end(error)
        for part in (self._metrics, self._tensorboard, self._logs):
            if part:
                part.close()
        failure = self._metrics and (self._metrics.failure or self._metrics.loss)
        if failure and kind in (None, Stopped):
            raise RunError(f"{failure}; the events after its last line are lost")

    def _report_end(self, error: Exception | None) -> None:
        """Write the last event. Programs read it instead of the log and the exit code."""
        if error is None:
            self.event("end", outcome="finished")
        elif isinstance(error, Stopped):
            self.event("end", outcome="stopped")
        else:
            prefix = "" if isinstance(error, ProgramExit) else f"{type(error).__name__}: "
            self.event("end", outcome="failed", reason=f"{prefix}{error}".partition("\n")[0])


class Progress:
    """An epoch's progress: a bar on a terminal, else about ten lines per epoch.

    Schedulers' logs and pipes get lines: a bar would fill them with carriage returns.
    """

    def __init__(self, reporter: Reporter, epoch: int, done: int, total: int):
        self._epoch, self._total = epoch, total
        self._bar = None
        if reporter.output_dir and sys.stderr.isatty():
            with may_be_gone(sys.stderr):
                self._bar = tqdm(
                    initial=done, total=total, desc=f"epoch {epoch}", unit="step", leave=False
                )

    def update(self, done: int, perplexity: float, learning_rate: float, speed: float) -> None:
        """Show the state after a step.

        Args:
          done: Steps of this epoch that are done.
          perplexity: Training perplexity of the epoch so far.
          learning_rate: Of the last step.
          speed: Words per second, all ranks together.
        """
        if self._bar is not None:
            text = f"perplexity {perplexity:.2f}, {speed:.0f} words/s"
            self._bar.set_postfix_str(text, refresh=False)
            with may_be_gone(sys.stderr):
                self._bar.update()
        elif 10 * done // self._total > 10 * (done - 1) // self._total:
            logger.info(
                f"epoch {self._epoch}  step {done}/{self._total}  train perplexity"
                f" {perplexity:.2f}  learning rate {learning_rate:.4g}  {speed:.0f} words/s"
            )

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            with may_be_gone(sys.stderr):
                self._bar.close()


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
