"""Reports of a run: events in `metrics.jsonl` and TensorBoard, and the progress of an epoch."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tqdm.auto

from lm import logger
from lm.errors import ProgramExit, RunError, Stopped
from lm.events.append import RetryingAppend
from lm.events.logs import LogFiles, may_be_gone
from lm.events.observer import Observer
from lm.events.tensorboard import TensorBoardWriter
from lm.record import METRICS_FILE, OBSERVER_FILE, TENSORBOARD_DIR

_SILENT_SECONDS = 60.0
_LOG_SECONDS = 50.0  # less, so that steps are reported before the log is silent for too long


class Reporter:
    """Writes the events of a run on rank 0, and the reason for its end to the log files.

    `output_dir` is None on all ranks except rank 0. `has_perplexity` says whether exp(loss) of a
    step is a perplexity. `on_event` is a shell command that receives the events.
    """

    logs: LogFiles | None = None
    peak_speed: float | None = None  # tokens/s at the peak of matrix products, if it is known
    early_end: str | None = None  # why the training ended before its last epoch

    def __init__(
        self,
        output_dir: str | None,
        tensorboard: bool = False,
        has_perplexity: bool = True,
        on_event: str | None = None,
    ):
        self.output_dir = output_dir
        self._metrics, self._tensorboard, self._observer = None, None, None
        if output_dir:
            self._metrics = RetryingAppend(os.path.join(output_dir, METRICS_FILE))
            if tensorboard:
                directory = os.path.join(output_dir, TENSORBOARD_DIR)
                self._tensorboard = TensorBoardWriter(directory, has_perplexity)
            if on_event:
                self._observer = Observer(on_event, os.path.join(output_dir, OBSERVER_FILE))

    def event(self, kind: str, **fields: Any) -> None:
        """Append a JSON object to metrics.jsonl, and send it to TensorBoard and to the observer."""
        if kind == "step" and self.peak_speed:
            fields["share_of_gemm_peak"] = fields["tokens_per_second"] / self.peak_speed
        if self._metrics:
            # JSON cannot represent NaN and infinity.
            finite = {
                name: value
                for name, value in fields.items()
                if not isinstance(value, float) or math.isfinite(value)
            }
            line = json.dumps({"event": kind, **finite}).encode() + b"\n"
            self._metrics.write(line)
            if self._observer:
                self._observer.send(line)
        if self._tensorboard:
            self._tensorboard.write(kind, fields)

    def progress(self, epoch: int, done: int, total: int, ends: Sequence[int]) -> Progress:
        """Start the progress of an epoch."""
        return Progress(self.output_dir is not None, epoch, done, total, ends, self.peak_speed)

    def sync(self) -> None:
        """Flush the events to disk, so that they survive a power failure."""
        if self._metrics:
            self._metrics.sync()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type | None, error: Exception | None, _: object) -> None:
        """Write the reason for the end as the last log line and event; close the event files."""
        if isinstance(error, ProgramExit) and self.logs:
            self.logs.write(str(error))
        self.report_end(error)
        for part in (self._metrics, self._tensorboard, self._observer):
            if part:
                part.close()
        failure = self._metrics and (self._metrics.failure or self._metrics.loss)
        if failure and kind in (None, Stopped):
            raise RunError(f"{failure}; the events after its last line are lost")

    def report_end(self, error: Exception | None) -> None:
        """Write the event for the end of the job, given the error that ends it."""
        if error is None:
            reason = {"reason": self.early_end} if self.early_end else {}
            self.event("end", outcome="finished", **reason)
        elif isinstance(error, (Stopped, KeyboardInterrupt)):
            self.event("end", outcome="stopped")
        else:
            prefix = "" if isinstance(error, ProgramExit) else f"{type(error).__name__}: "
            self.event("end", outcome="failed", reason=f"{prefix}{error}".partition("\n")[0])


class Heartbeat(logging.Handler):
    """Logs the current activity when the log was silent for a minute, until it is closed."""

    def __init__(self, activity: Callable[[], str], seconds: float = _SILENT_SECONDS):
        super().__init__()
        self._activity, self._seconds = activity, seconds
        self._logged_at, self._closed = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        logger.addHandler(self)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._logged_at = time.monotonic()

    def close(self) -> None:
        """Stop logging."""
        logger.removeHandler(self)
        self._closed.set()
        self._thread.join()
        super().close()

    def _beat(self) -> None:
        while not self._closed.wait(max(0.0, self._logged_at + self._seconds - time.monotonic())):
            if time.monotonic() >= self._logged_at + self._seconds:
                self._logged_at = time.monotonic()  # also if the user's settings drop the line
                logger.info(f"still in {self._activity()}")


class _Bar(tqdm.auto.tqdm):
    monitor_interval = 0  # tqdm's monitor thread would outlive the run


def shows_bar() -> bool:
    """Return whether rank 0 shows progress bars, on a terminal or in a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class Progress:
    """The progress of an epoch: a bar on a terminal or in a notebook, otherwise log lines.

    There are about ten lines per epoch, or a line every minute in a long epoch. Only rank 0 may
    show a bar. The speed is the speed of this job, which may have resumed within the epoch.

    Args:
      done: The number of steps of the epoch that earlier jobs have trained.
      total: The number of steps of the epoch.
      ends: The last step of the epoch and the last step of the run, counted from the start of the
        epoch.
      peak_speed: The tokens/s at the peak of matrix products, or None.
    """

    def __init__(
        self,
        is_rank_0: bool,
        epoch: int,
        done: int,
        total: int,
        ends: Sequence[int],
        peak_speed: float | None = None,
    ):
        self._epoch, self._first, self._done, self._total = epoch, done, done, total
        self._ends, self._tokens, self._seconds = ends, 0, 0.0
        self._peak_speed = peak_speed
        self._bar, self._logged_at = None, time.monotonic()
        if is_rank_0 and shows_bar():
            with may_be_gone(sys.stderr):
                self._bar = _Bar(
                    initial=done, total=total, desc=f"epoch {epoch}", unit="step", leave=False
                )

    def update(
        self, quality: tuple[str, float], learning_rate: float, tokens: int, seconds: float
    ) -> None:
        """Show the progress after a step of this number of tokens and seconds.

        `quality` is the name and the value of the loss or perplexity.
        """
        name, value = quality
        self._done += 1
        self._tokens += tokens
        self._seconds += seconds
        done, speed = self._done, self._speed_text(self._tokens / self._seconds)
        per_step = self._seconds / (done - self._first)
        of_epoch, of_run = (
            tqdm.auto.tqdm.format_interval(per_step * (end - done)) for end in self._ends
        )
        if self._bar is not None:  # the bar shows the remaining time of the epoch
            text = f"run {of_run}, {name} {value:.2f}, {speed}"
            self._bar.set_postfix_str(text, refresh=False)
            with may_be_gone(sys.stderr):
                self._bar.update()
        elif (
            10 * done // self._total > 10 * (done - 1) // self._total
            or time.monotonic() - self._logged_at > _LOG_SECONDS
        ):
            self._logged_at = time.monotonic()
            logger.info(
                f"epoch {self._epoch}  step {done}/{self._total}  train {name} {value:.2f}"
                f"  learning rate {learning_rate:.4g}  {speed}"
                f"  left {of_epoch}, run {of_run}"
            )

    def _speed_text(self, speed: float) -> str:
        share = f" ({speed / self._peak_speed:.0%} of GEMM peak)" if self._peak_speed else ""
        return f"{speed:.0f} tokens/s{share}"

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            with may_be_gone(sys.stderr):
                self._bar.close()
