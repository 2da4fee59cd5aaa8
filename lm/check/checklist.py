"""The lines of a check: OK, WARN or FAIL, the result, and how to fix a problem."""

from __future__ import annotations

OK, WARN, FAIL = "OK", "WARN", "FAIL"
FAILURE = "not ready to train: see the lines marked FAIL above"


class Checklist:
    """Prints results immediately and counts them.

    Args:
      silent: Whether to print nothing, on all ranks except rank 0.
    """

    def __init__(self, silent: bool = False):
        self._silent = silent
        self.counts = {OK: 0, WARN: 0, FAIL: 0}

    def add(self, status: str, name: str, result: str, fix: str = "") -> None:
        """Print a result, and its fix unless the status is OK."""
        self.counts[status] += 1
        self._print(f"{status:4}  {name:10}  {result}")
        if status != OK:
            self._print(f"{'':18}-> {fix}")

    def conclude(self) -> None:
        """Print the last line: whether training can start."""
        verdict = "not ready" if self.counts[FAIL] else "ready"
        self._print(f"{verdict}: {self.counts[FAIL]} FAIL, {self.counts[WARN]} WARN")

    def _print(self, line: str) -> None:
        if not self._silent:
            print(line, flush=True)
