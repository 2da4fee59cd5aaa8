"""Lines of a check-up: OK, WARN or FAIL, what was found, and the remedy."""

from __future__ import annotations

READY, NOT_READY = "ready", "not ready"


class Checklist:
    """Prints checks as they are made, and remembers how they went.

    Args:
      silent: Print nothing: for the ranks that are not to speak.
    """

    def __init__(self, silent: bool = False):
        self._silent = silent
        self.num_warnings = self.num_failures = 0

    def ok(self, name: str, found: str) -> None:
        """Print what is as it should be."""
        self._print("OK", name, found)

    def warn(self, name: str, found: str, remedy: str) -> None:
        """Print what works, but not well."""
        self.num_warnings += 1
        self._print("WARN", name, found, remedy)

    def fail(self, name: str, found: str, remedy: str) -> None:
        """Print what makes training impossible or wrong."""
        self.num_failures += 1
        self._print("FAIL", name, found, remedy)

    def judge(self, good: bool, name: str, found: str, remedy: str, fatal: bool = False) -> None:
        """Print OK if it is good, else WARN, or FAIL where that is fatal."""
        if good:
            self.ok(name, found)
        else:
            (self.fail if fatal else self.warn)(name, found, remedy)

    def conclude(self) -> None:
        """Print the last line, which starts with READY or NOT_READY."""
        counts = f"{self.num_failures} FAIL, {self.num_warnings} WARN"
        self._say(f"{NOT_READY if self.num_failures else READY}: {counts}")

    def _print(self, status: str, name: str, found: str, remedy: str = "") -> None:
        self._say(f"{status:4}  {name:10}  {found}")
        if remedy:
            self._say(f"{'':18}-> {remedy}")

    def _say(self, line: str) -> None:
        if not self._silent:
            print(line, flush=True)
