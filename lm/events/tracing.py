"""Traces of single steps, for Perfetto and chrome://tracing."""

from __future__ import annotations

import logging
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


def run_traced(session: tf.Session, path: str, fetches: Any, feed: dict) -> Any:
    """Return `session.run(fetches, feed)`, and write its trace to a file."""
    metadata = tf.RunMetadata()
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    values = session.run(fetches, feed, options=options, run_metadata=metadata)
    trace = Timeline(metadata.step_stats).generate_chrome_trace_format()
    try:
        write_atomically(path, trace.encode())
    except OSError as error:
        logger.warning("cannot write %s (%s); training continues", path, error.strerror)
    return values
