"""How long a step will take on N ranks: an alpha-beta model of the exchange.

  step(N)     = compute(rows of a rank) + exchange(N)
  exchange(N) = fixed + sum over messages (
      per_message + (2 ceil(log2 N) + hops(N)) alpha + bytes_sent(N) (per_byte_sent + beta))

with alpha the latency of a link, beta its seconds per byte, and the others `HostCosts`. In the 2
ceil(log2 N) hops all ranks tell each other that they have the message. Each allreduce is taken for
recursive halving and doubling (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH"): 2 ceil(log2 N) hops, and each rank sends 2 (N - 1) / N of the
message. lm/distributed/open_mpi_rules.conf asks for it on three ranks and more, from 64 KB on; a
smaller message is sent whole, in half of the hops. An allgather is a ring, the slowest that MPI may
choose: N - 1 hops, half of the bytes. Computation and exchange do not overlap in the model; on a
host whose every core computes they hardly do, on a cluster it is the worst case.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lm.benchmark.messages import Message, messages_of_step
from lm.config import Config


class HostCosts(NamedTuple):
    """What the exchange costs on the host where it was measured, in seconds."""

    fixed: float  # once per step: Horovod's cycle
    per_message: float
    per_byte_sent: float  # copying, and adding up


class Link(NamedTuple):
    """The network between ranks."""

    latency: float = 0.0  # seconds
    seconds_per_byte: float = 0.0


def fit_host_costs(
    one: float, many: float, step: float, num_messages: int, bytes_sent: float
) -> HostCosts:
    """Solve for the costs from three measurements, none of them below zero.

    Args:
      one: Seconds of one empty message.
      many: Seconds of as many empty messages as a step has, started together.
      step: Seconds of the messages of a step.
      num_messages: Messages of a step, at least 2.
      bytes_sent: What each rank sends in a step.
    """
    per_message = max(many - one, 0.0) / (num_messages - 1)
    per_byte_sent = max(step - max(many, one), 0.0) / bytes_sent
    return HostCosts(max(one - per_message, 0.0), per_message, per_byte_sent)


def hops(message: Message, ranks: int) -> int:
    """Return how many times in turn a message crosses a link."""
    return 2 * math.ceil(math.log2(ranks)) if message.collective == "allreduce" else ranks - 1


def predict_exchange(
    messages: Sequence[Message], ranks: int, costs: HostCosts, link: Link
) -> float:
    """Return the seconds of a step's exchange, 0 for one rank.

    Args:
      messages: What a step exchanges.
      ranks: N.
      costs: Of the host's software and memory.
      link: The network; the default one costs nothing, for ranks on one host.
    """
    if ranks == 1:
        return 0.0
    # Before Horovod exchanges a tensor, all ranks tell each other that they have it.
    negotiation = 2 * math.ceil(math.log2(ranks)) * link.latency
    return costs.fixed + sum(
        costs.per_message
        + negotiation
        + hops(message, ranks) * link.latency
        + message.bytes_sent(ranks) * (costs.per_byte_sent + link.seconds_per_byte)
        for message in messages
    )


class Predictor(NamedTuple):
    """Predicts steps from what was measured."""

    config: Config  # of one rank
    vocab_size: int
    compute: Mapping[int, float]  # rows of a rank -> measured seconds of its step alone
    costs: HostCosts  # of the exchange on this host

    def predict(self, ranks: int, kind: str, link: Link) -> dict[str, float]:
        """Predict N ranks.

        Args:
          ranks: N.
          kind: "strong" or "weak".
          link: The network.

        Returns:
          `compute_ms`, `exchange_ms`, `step_ms`, `speedup` and `efficiency`.
        """
        batch_size = self.config.batch_size
        rows = -(-batch_size // ranks) if kind == "strong" else batch_size
        work = ranks if kind == "weak" else 1
        sized = dataclasses.replace(self.config, batch_size=work * batch_size)
        messages = messages_of_step(sized, self.vocab_size)
        exchange = predict_exchange(messages, ranks, self.costs, link)
        step = self.compute[rows] + exchange
        speedup = work * self.compute[batch_size] / step
        return {
            "ranks": ranks,
            "compute_ms": 1000 * self.compute[rows],
            "exchange_ms": 1000 * exchange,
            "step_ms": 1000 * step,
            "speedup": speedup,
            "efficiency": speedup / ranks,
        }
