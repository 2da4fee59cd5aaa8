"""Long work on some ranks while the others wait, in touch all the time.

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
    """Lets rank 0 work while the other ranks wait in `gather` for what it will say.

    Args:
      gather: Returns the JSON-serializable values of all ranks, by rank.
      rank: This rank.
      beat: Called at each sign of life.
      stop_requested: Returns the number of the signal that asked this rank to stop, or 0.
    """

    def __init__(
        self,
        gather: Callable[[Any], list],
        rank: int,
        beat: Callable[[], None],
        stop_requested: Callable[[], int],
    ):
        self._gather, self._rank = gather, rank
        self._beat, self._stop_requested = beat, stop_requested
        self._next_call = time.monotonic() + _CALL_SECONDS

    def at_work(self) -> None:
        """Tell the waiting ranks, about once a second, that rank 0 is at work.

        Raises:
          Interrupted: A rank has been asked to stop.
        """
        self._beat()
        if self._rank == 0 and (time.monotonic() > self._next_call or self._stop_requested()):
            self._exchange(done=False)
            self._next_call = time.monotonic() + _CALL_SECONDS

    def gather(self, value: Any) -> list:
        """Wait for rank 0 to be done; returns the values of all ranks, by rank.

        Raises:
          Interrupted: A rank has been asked to stop.
        """
        while True:
            calls = self._exchange(done=True, value=value)
            if calls[0]["done"]:
                return [call["value"] for call in calls]

    def _exchange(self, done: bool, value: Any = None) -> list[dict]:
        calls = self._gather({"done": done, "value": value, "stop": self._stop_requested()})
        self._beat()
        stop = max(call["stop"] for call in calls)
        if stop and not calls[0]["done"]:
            raise Interrupted(stop)
        return calls
