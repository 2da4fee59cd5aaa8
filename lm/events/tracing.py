"""Traces of single steps, for Chrome's trace viewer (chrome://tracing) and Perfetto."""

from __future__ import annotations

import logging
import os
from typing import Any, Callable, Optional

import tensorflow.compat.v1 as tf
from tensorflow.python.client.timeline import Timeline

from lm.errors import UserError
from lm.files import write_atomically

logger = logging.getLogger("lm")


def parse_steps(text: Optional[str]) -> range:
    """Turn "A:B" into the steps A to B, both included; None into no steps.

    Raises:
      UserError: The text is not two step numbers in order.
    """
    if text is None:
        return range(0)
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"profile_steps must be FIRST:LAST, such as 100:102, not {text!r}")
    return range(int(first), int(last) + 1)


class StepTracer:
    """Runs steps, and writes a trace of the chosen ones.

    Args:
      session: Runs them.
      steps: The global steps to trace, counted from 1.
      directory: Where trace-STEP.json goes; None traces nothing.
    """

    def __init__(self, session: tf.Session, steps: range, directory: Optional[str]):
        self._session, self._steps, self._directory = session, steps, directory

    def run_of(self, step: int) -> Callable[[Any, dict], Any]:
        """Return what runs a step as `session.run(fetches, feed)` does, traced if it was chosen."""
        if self._directory is None or step not in self._steps:
            return self._session.run
        return lambda fetches, feed: self._traced(step, fetches, feed)

    def _traced(self, step: int, fetches: Any, feed: dict) -> Any:
        metadata = tf.RunMetadata()
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        values = self._session.run(fetches, feed, options=options, run_metadata=metadata)
        trace = Timeline(metadata.step_stats).generate_chrome_trace_format()
        path = os.path.join(self._directory, f"trace-{step}.json")
        try:
            write_atomically(path, trace.encode())
        except OSError as error:  # no reason to end a run
            logger.warning("cannot write %s: %s", path, error.strerror)
        return values
