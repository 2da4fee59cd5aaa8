"""The lines of a check-up: OK, WARN or FAIL, what was found, and the remedy."""

from __future__ import annotations

OK, WARN, FAIL = "OK", "WARN", "FAIL"  # as it should be; works, but not well; must be mended
FAILURE = "not ready to train: see the remedies above"


class Checklist:
    """Prints findings as they are made, and counts them.

    Args:
      silent: Print nothing: for the ranks that are not to speak.
    """

    def __init__(self, silent: bool = False):
        self._silent = silent
        self.counts = {OK: 0, WARN: 0, FAIL: 0}

    def add(self, status: str, name: str, found: str, remedy: str = "") -> None:
        """Print what was found, and the remedy unless the status is OK."""
        self.counts[status] += 1
        self._say(f"{status:4}  {name:10}  {found}")
        if status != OK:
            self._say(f"{'':18}-> {remedy}")

    def conclude(self) -> None:
        """Print the last line: whether all is ready."""
        verdict = "not ready" if self.counts[FAIL] else "ready"
        self._say(f"{verdict}: {self.counts[FAIL]} FAIL, {self.counts[WARN]} WARN")

    def _say(self, line: str) -> None:
        if not self._silent:
            print(line, flush=True)
