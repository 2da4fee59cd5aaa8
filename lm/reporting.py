"""What a run tells: the console, `log.txt` and `metrics.jsonl`."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from typing import Any, Optional

_logger = logging.getLogger("lm")


class Reporter:
    """Writes a run's records on rank 0; on the other ranks it is silent.

    Args:
      output_dir: The run's directory, which exists; None on all ranks but 0, so that they
        cannot corrupt its files.
    """

    def __init__(self, output_dir: Optional[str]):
        self.output_dir = output_dir
        self._metrics = None
        if output_dir:
            handler = logging.FileHandler(os.path.join(output_dir, "log.txt"), encoding="utf-8")
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            _logger.addHandler(handler)
            self._metrics = open(
                os.path.join(output_dir, "metrics.jsonl"), "a", encoding="utf-8", buffering=1
            )

    def log(self, message: str) -> None:
        """Write a line to the console and to log.txt."""
        _logger.info(message)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one JSON object to metrics.jsonl, at once, so that a killed run keeps it."""
        if self._metrics:
            finite = {name: _json_value(value) for name, value in fields.items()}
            self._metrics.write(json.dumps({"event": kind, **finite}) + "\n")

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file into the run's directory."""
        if self.output_dir:
            with open(os.path.join(self.output_dir, name), "w", encoding="utf-8") as file:
                json.dump(value, file, indent=2)
                file.write("\n")


def _json_value(value: Any) -> Any:
    # JSON has no NaN and no infinity; readers in other languages fail on Python's.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def start_console(rank: int) -> None:
    """Send rank 0's log lines, and all ranks' warnings, to stderr, without time stamps."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.WARNING if rank else logging.INFO)
    _logger.propagate = False
