"""Traces of single steps, for Perfetto and chrome://tracing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.client.timeline import Timeline

from lm.errors import UserError
from lm.files import write_atomically

logger = logging.getLogger("lm")


def parse_steps(text: str | None) -> range:
    """Parse "FIRST:LAST" into a range that includes both steps; None means no steps."""
    if text is None:
        return range(0)
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"profile_steps must be FIRST:LAST, such as 100:102, not {text!r}")
    return range(int(first), int(last) + 1)


class StepTracer:
    """Runs steps, and writes trace-STEP.json for the selected steps.

    Args:
      session: The session of the run.
      steps: The global steps to trace, counted from 1.
      directory: The directory for the traces; None disables tracing.
    """

    def __init__(self, session: tf.Session, steps: range, directory: str | None):
        self._session, self._directory = session, directory
        self._steps = range(0) if directory is None else steps

    def run_of(self, step: int) -> Callable[[Any, dict], Any]:
        """Return `session.run` for a step, or a replacement that traces the step if selected."""
        if step not in self._steps:
            return self._session.run
        return lambda fetches, feed: self._run_traced(step, fetches, feed)

    def _run_traced(self, step: int, fetches: Any, feed: dict) -> Any:
        metadata = tf.RunMetadata()
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        values = self._session.run(fetches, feed, options=options, run_metadata=metadata)
        trace = Timeline(metadata.step_stats).generate_chrome_trace_format()
        path = os.path.join(self._directory, f"trace-{step}.json")
        try:
            write_atomically(path, trace.encode())
        except OSError as error:
            logger.warning("cannot write %s (%s); training continues", path, error.strerror)
        return values
