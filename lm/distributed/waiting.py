"""Long work on one rank or on several while those that are done wait, in touch all the time.

Without it a rank that waits in one long exchange could not tell a long evaluation from a dead
host, nor hear that a signal asks all ranks to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_CALL_SECONDS = 1.0


class Interrupted(Exception):
    """A signal has asked the ranks to stop; raised on all of them at the same point.

    Args:
      number: The signal's.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class WaitingRoom:
    """Lets some ranks work while those that are done, or have nothing to do, wait in `gather`.

    About once a second all ranks meet in one exchange. Those at work wait there for one window of
    the slowest, at most; those that are done see that it goes on.

    Args:
      gather: Returns the JSON-serializable values of all ranks, by rank.
      beat: Called at once, and at each sign of life.
      stop_requested: Returns the number of the signal that asked this rank to stop, or 0.
    """

    def __init__(
        self,
        gather: Callable[[Any], list],
        beat: Callable[[], None],
        stop_requested: Callable[[], int],
    ):
        self._gather, self._beat, self._stop_requested = gather, beat, stop_requested
        self._next_call = time.monotonic() + _CALL_SECONDS
        beat()

    def at_work(self) -> None:
        """Tell the others, about once a second, that this rank is at work.

        Raises:
          Interrupted: A rank has been asked to stop.
        """
        self._beat()
        if time.monotonic() > self._next_call or self._stop_requested():
            self._exchange(done=False)

    def gather(self, value: Any) -> list:
        """Wait for all ranks to be done; returns their values, by rank.

        Raises:
          Interrupted: A rank has been asked to stop.
        """
        while True:
            calls = self._exchange(done=True, value=value)
            if _all_done(calls):
                return [call["value"] for call in calls]

    def _exchange(self, done: bool, value: Any = None) -> list[dict]:
        calls = self._gather({"done": done, "value": value, "stop": self._stop_requested()})
        self._beat()
        self._next_call = time.monotonic() + _CALL_SECONDS
        stop = max(call["stop"] for call in calls)
        if stop and not _all_done(calls):
            raise Interrupted(stop)
        return calls


def _all_done(calls: list[dict]) -> bool:
    return all(call["done"] for call in calls)
