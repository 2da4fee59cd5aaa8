"""The interface of exchanges between ranks, and its implementation for one process."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


class Communicator:
    """The only rank of a single process. `HorovodCommunicator` connects several ranks.

    All ranks must call each method, in the same order.

    Attributes:
      local_rank: This rank among the ranks on its host.
      backend: Name of the exchange mechanism, for the log.
      transport: Network protocol of the backend, for the log.
      settings: Environment variables that configure the exchange.
    """

    rank, size = 0, 1
    local_rank, local_size = 0, 1
    backend = transport = "none"
    settings: dict[str, str] = {}  # noqa: RUF012 - never modified

    @property
    def is_rank_0(self) -> bool:
        """Whether this is rank 0, which writes the files and prints the messages."""
        return self.rank == 0

    def why_inexact(self, sizes: Collection[int]) -> str:
        """Explain why sums of arrays of these sizes are not trees of neighbors; "" if they are."""
        return ""

    def distribute(self, optimizer):
        """Return an optimizer whose `compute_gradients` sums the gradients over the ranks."""
        return optimizer

    def sum(self, tensor, name: str):
        """Return the sum of a graph tensor over the ranks. All ranks must use the same name."""
        return tensor

    def broadcast(self, tensor, name: str):
        """Return rank 0's value of a graph tensor. All ranks must use the same name."""
        return tensor

    def broadcast_variables(self):
        """Return the fetches that copy rank 0's global variables to all ranks."""
        return []

    def concat(self, array: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks, concatenated along axis 0 in rank order."""
        return array

    def gather(self, value: Any) -> list:
        """Wait for all ranks, and return their JSON-serializable values in rank order."""
        return [value]

    def barrier(self) -> None:
        self.gather(None)
