"""What passes between the ranks of a run: the interface, and the case of one process.

The rest of the program is handed a Communicator and reads as one for a single process.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Collection
from typing import Any

import numpy as np


class Communicator(abc.ABC):
    """The ranks of a run. Every method is to be called by all of them, in the same order.

    Attributes:
      rank: This rank, from 0.
      size: Number of ranks.
      local_rank: This rank among those of its host.
      local_size: Ranks on this host.
      backend: How they exchange, for the log.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    backend: str

    @property
    def is_rank_0(self) -> bool:
        """Whether this is rank 0, which evaluates, writes files and talks to the user."""
        return self.rank == 0

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, str]:
        """The environment variables that the exchange is set by: defaults or the user's."""

    @abc.abstractmethod
    def why_inexact(self, sizes: Collection[int]) -> str:
        """Tell why sums over the ranks are not made as a tree, neighbours first.

        Args:
          sizes: Of the arrays that will be summed.

        Returns:
          "" where they are.
        """

    @abc.abstractmethod
    def distribute(self, optimizer):
        """Return an optimizer whose `compute_gradients` sums the gradients over the ranks."""

    @abc.abstractmethod
    def sum(self, tensor, name: str):
        """Return the graph's tensor summed over the ranks; `name` must be the same on all."""

    @abc.abstractmethod
    def broadcast(self, tensor, name: str):
        """Return rank 0's value of the graph's tensor; `name` must be the same on all ranks."""

    @abc.abstractmethod
    def hooks(self) -> list:
        """Return the session hooks that make the ranks start equal."""

    @abc.abstractmethod
    def concat(self, array: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks, joined along axis 0 in the order of the ranks."""

    @abc.abstractmethod
    def gather(self, value: Any) -> list:
        """Return the JSON-serializable values of all ranks, by rank; waits for all of them."""

    @abc.abstractmethod
    def start_timeline(self, path: str) -> None:
        """Record the exchanges in a file of rank 0."""

    @abc.abstractmethod
    def stop_timeline(self) -> None:
        """Complete the timeline's file."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)


class OneProcess(Communicator):
    """A run of one process: every exchange is with itself."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1
    backend = "none"
    settings: dict[str, str] = {}  # noqa: RUF012 - nothing changes it

    def why_inexact(self, sizes: Collection[int]) -> str:
        return ""

    def distribute(self, optimizer):
        return optimizer

    def sum(self, tensor, name: str):
        return tensor

    def broadcast(self, tensor, name: str):
        return tensor

    def hooks(self) -> list:
        return []

    def concat(self, array: np.ndarray) -> np.ndarray:
        return array

    def gather(self, value: Any) -> list:
        return [value]

    def start_timeline(self, path: str) -> None:
        logging.getLogger("lm").warning("one process exchanges nothing: no timeline is written")

    def stop_timeline(self) -> None:
        pass
