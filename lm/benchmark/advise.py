"""`advise`: predict the speedup of more ranks, on this host and on a cluster.

The prediction is an alpha-beta model of the gradient exchange:

  step(N)     = compute(rows of a rank) + exchange(N)
  exchange(N) = fixed + sum over messages (
      4 ceil(log2 N) alpha + 2 (N - 1) / N bytes (seconds_per_byte + beta))

alpha is the latency of a link, and beta its seconds per byte. `fixed` and `seconds_per_byte` are
measured on this host. Horovod needs 2 ceil(log2 N) hops until the ranks agree on a message. The
exchange needs as many hops with recursive halving and doubling (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005). open_mpi_rules.conf selects
this algorithm for three or more ranks and messages of at least 64 KB. The model assumes that
computation and exchange do not overlap, which is the worst case on a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lm.benchmark.scaling import KINDS, bytes_sent, message_bytes, scaled_config, scaling_tasks
from lm.benchmark.turns import print_table, take_turns
from lm.benchmark.worker import Options, Task, run
from lm.config import Config
from lm.errors import UserError
from lm.options import option

_CLUSTERS = [2**power for power in range(13)]  # rank counts
_COLUMNS = [
    ("scaling", "{kind}"),
    ("ranks", "{ranks}"),
    ("compute ms", "{compute_ms:.2f}"),
    ("exchange ms", "{exchange_ms:.2f}"),
    ("step ms", "{step_ms:.2f}"),
    ("speedup", "{speedup:.2f}"),
    ("efficiency", "{efficiency:.3f}"),
]
_MEASURED_COLUMNS = [
    ("measured ms", "{measured_step_ms:.2f}"),
    ("error", "{error:.0%}"),
    ("measured speedup", "{measured_speedup:.2f}"),
]


@dataclass(frozen=True)
class AdviceOptions(Options):
    """Predict the speedup of more ranks, on this host and on a cluster.

    The prediction is based on the step of one rank and on the gradient exchange, both measured on
    this host. It is compared with measurements of --ranks, and extended to a cluster with one rank
    per host.

    python -m lm.benchmark advise --config config_small --ranks 1,2 --link_gbps 25
    """

    repeats: int = option(4, "measurements of each kind", low=1)
    ranks: str = option("1,2", "comma-separated rank counts to measure on this host")
    link_latency_us: float = option(25.0, "latency between hosts in microseconds", low=0)
    link_gbps: float = option(10.0, "bandwidth between hosts in 10^9 bit/s", above=0)

    def check(self, config: Config) -> None:
        super().check(config)
        if self.rank_counts[-1] < 2:
            raise UserError("the largest of ranks must be at least 2, not 1")


@dataclass(frozen=True)
class ExchangeCosts:
    """Costs of the gradient exchange on this host or on a cluster."""

    fixed: float = 0.0  # seconds per step: Horovod's cycle, and the work for each message
    latency: float = 0.0  # seconds per hop
    seconds_per_byte: float = 0.0  # seconds per byte that a rank sends

    def seconds(self, sizes: Sequence[int], ranks: int) -> float:
        """Return the time that N ranks need to exchange messages of these sizes in bytes."""
        if ranks == 1:
            return 0.0
        hops = 4 * math.ceil(math.log2(ranks)) * len(sizes)
        sent = bytes_sent(sum(sizes), ranks)
        return self.fixed + hops * self.latency + sent * self.seconds_per_byte


@dataclass(frozen=True)
class Predictor:
    """Predicts steps on several ranks from the measured steps of one rank."""

    config: Config
    shapes: Mapping[str, Sequence[int]]  # variable name -> shape
    compute: Mapping[Any, float]  # rows -> seconds of a step on one rank

    def predict(self, kind: str, ranks: int, costs: ExchangeCosts) -> dict[str, Any]:
        """Predict the step time of N ranks with "strong" or "weak" scaling."""
        sized = scaled_config(self.config, kind, ranks)
        compute = self.compute[-(-sized.batch_size // ranks)]
        exchange = costs.seconds(message_bytes(sized, self.shapes), ranks)
        work = sized.batch_size / self.config.batch_size
        speedup = work * self.compute[self.config.batch_size] / (compute + exchange)
        return {
            "kind": kind,
            "ranks": ranks,
            "compute_ms": 1000 * compute,
            "exchange_ms": 1000 * exchange,
            "step_ms": 1000 * (compute + exchange),
            "speedup": speedup,
            "efficiency": speedup / ranks,
        }


def measure(config: Config, options: AdviceOptions) -> dict[str, Any]:
    """Measure steps and the exchange, predict step times, and compare both on this host."""
    counts = [ranks for ranks in options.rank_counts if ranks > 1]
    clusters = {"strong": [n for n in _CLUSTERS if n <= config.batch_size], "weak": _CLUSTERS}
    shapes = run(Task(config), options)["shapes"]
    sizes = message_bytes(config, shapes)
    rows = {-(-config.batch_size // ranks) for ranks in [*counts, *clusters["strong"]]}
    results = take_turns(
        {
            "exchange": Task(config, "exchange", counts[0], sizes),
            **{count: Task(replace(config, batch_size=count)) for count in rows},
            **scaling_tasks(config, counts),
        },
        options,
    )
    exchange = results.pop("exchange")
    empty, full = median(exchange["empty"]), median(exchange["full"])
    seconds = {name: median(result["seconds"]) for name, result in results.items()}
    per_byte = max(full - empty, 0.0) / bytes_sent(sum(sizes), counts[0])
    beta = 8e-9 / options.link_gbps
    host = ExchangeCosts(empty, 0.0, per_byte)
    cluster = ExchangeCosts(empty, options.link_latency_us * 1e-6, per_byte + beta)
    predict = Predictor(config, shapes, seconds).predict
    here = [
        _compared(predict(kind, ranks, host), seconds[kind, ranks])
        for kind in KINDS
        for ranks in counts
    ]
    return {
        "threads_per_rank": options.threads,
        "exchange_costs": host,
        "here": here,
        "cluster": [predict(kind, ranks, cluster) for kind in KINDS for ranks in clusters[kind]],
    }


def _compared(row: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Add the measured seconds of a step, and the error, to a prediction."""
    ratio = row["step_ms"] / (1000 * seconds)
    return {
        **row,
        "measured_step_ms": 1000 * seconds,
        "measured_speedup": row["speedup"] * ratio,
        "error": ratio - 1,
    }


def show(config: Config, options: AdviceOptions, record: dict[str, Any]) -> None:
    """Print the predictions for this host and for the cluster, and the warnings."""
    costs = record["exchange_costs"]
    print(
        f"\n{config.name}, {config.precision}, {options.threads} thread(s) per rank. Exchange on"
        f" this host: {1e3 * costs.fixed:.2f} ms per step,"
        f" {1e9 * costs.seconds_per_byte:.2f} ms per MB sent"
    )
    print_table([*_COLUMNS, *_MEASURED_COLUMNS], record["here"])
    print(
        f"\nPredicted for one rank per host, {options.link_latency_us:g} us and"
        f" {options.link_gbps:g} Gbit/s"
    )
    print_table(_COLUMNS, record["cluster"])
    for place, rows in (("on this host", record["here"]), ("on the cluster", record["cluster"])):
        for kind in KINDS:
            predicted = [row for row in rows if row["kind"] == kind]
            slower = [str(row["ranks"]) for row in predicted if row["ranks"] > 1 >= row["speedup"]]
            if slower:
                names = ", ".join(slower)
                print(f"warning: {place}, {kind} scaling: ONE RANK WINS against {names}")
