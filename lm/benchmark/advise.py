"""Predict the speedup of more ranks on a cluster with one rank per host.

  python -m lm.benchmark advise --config config_small --link_gbps 25

The prediction is based on the step of one rank and on the gradient exchange of two ranks, both
measured on this host. It is an alpha-beta model of the exchange:

  step(N)     = compute(rows of a rank) + exchange(N)
  exchange(N) = fixed + sum over messages (
      4 ceil(log2 N) alpha + 2 (N - 1) / N bytes (seconds_per_byte + beta))

alpha is the latency of a link, and beta its seconds per byte. `fixed` and `seconds_per_byte` are
measured on this host. Horovod needs 2 ceil(log2 N) hops until the ranks agree on a message. The
exchange needs as many hops with recursive halving and doubling (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005). open_mpi_rules.conf selects
this algorithm for three or more ranks and messages of at least 64 KB. The model assumes that
computation and exchange do not overlap, which is the worst case on a cluster. If all ranks share
the cores of one host (`--cores`), they take turns: step(N) is multiplied by N threads / cores,
or by N if one rank has more threads than there are cores, if this factor is greater than 1.

The prediction for each number of ranks also contains the part of the step that limits it
(computation, latency or bandwidth), the share of an epoch in which rank 0 evaluates PTB's
validation text alone, and the seconds in which the ranks load their files from a shared file
system.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from lm import logger
from lm.benchmark.scaling import KINDS, bytes_sent, message_bytes, scaled_config
from lm.benchmark.turns import RepeatedOptions, take_turns
from lm.benchmark.worker import Task, run
from lm.config import MAX_ROWS, Config
from lm.functions import VIRTUAL_RANKS
from lm.options import option

_RANKS = [2**power for power in range(13)]
_PTB_TOKENS = {"train": 929_589, "valid": 73_760}
_FORWARD_SHARE = 1 / 3  # the backward pass has two products for each product of the forward pass
# stat and open until the first step, counted with `strace -f -c -e trace=%file` (Python 3.11)
_FILE_OPERATIONS = 26_700


@dataclass(frozen=True)
class AdviceOptions(RepeatedOptions):
    """Options of `advise`."""

    repeats: int = option(4, "measurements of each kind", low=1)
    link_latency_us: float = option(25.0, "latency between hosts in microseconds", low=0)
    link_gbps: float = option(10.0, "bandwidth between hosts in 10^9 bit/s", above=0)
    file_operations_per_second: float = option(
        50_000.0, "file operations (stat and open) of the shared file system per second", above=0
    )
    cores: int | None = option(
        None, "cores that all ranks share (default: each rank has its own cores)", low=1
    )


class Part(NamedTuple):
    """The part of a global batch that a rank computes."""

    batch_size: int  # rows
    virtual_ranks: int  # micro-batches


@dataclass(frozen=True)
class Predictor:
    """Predicts the step time of several ranks from the step time of one rank and an exchange."""

    config: Config
    shapes: Mapping[str, Sequence[int]]  # variable name -> shape
    compute: Mapping[Part, float]  # seconds of a step on one rank
    fixed: float  # seconds per exchange: Horovod's cycle, and the work for each message
    seconds_per_byte: float  # seconds per byte that a rank sends
    latency: float = 0.0  # seconds per hop
    file_operations_per_second: float = math.inf
    ranks_at_once: float = math.inf  # ranks that the cores can run at the same time

    def exchange_seconds(self, sizes: Sequence[int], ranks: int) -> tuple[float, float]:
        """Return the time that N ranks need to exchange messages of these sizes in bytes.

        The first part does not depend on the sizes. The second part transfers the bytes.
        """
        if ranks == 1:
            return 0.0, 0.0
        hops = 4 * math.ceil(math.log2(ranks)) * len(sizes)
        sent = bytes_sent(sum(sizes), ranks)
        return self.fixed + hops * self.latency, sent * self.seconds_per_byte

    def predict(self, kind: str, ranks: int) -> dict[str, Any]:
        """Predict the step time of N ranks with "strong" or "weak" scaling."""
        sized = scaled_config(self.config, kind, ranks)
        compute = self.compute[part_of_rank(sized, ranks)]
        parts = compute, *self.exchange_seconds(message_bytes(sized, self.shapes), ranks)
        turns = max(ranks / max(self.ranks_at_once, 1.0), 1.0)
        compute, latency, transfer = (turns * part for part in parts)
        limits = {"computation": compute, "latency": latency, "bandwidth": transfer}
        exchange = latency + transfer
        work = sized.batch_size / self.config.batch_size
        one = self.compute[part_of_rank(self.config, 1)]
        speedup = work * one / (compute + exchange)
        return {
            "scaling": kind,
            "ranks": ranks,
            "compute_ms": 1000 * compute,
            "exchange_ms": 1000 * exchange,
            "step_ms": 1000 * (compute + exchange),
            "speedup": speedup,
            "efficiency": speedup / ranks,
            "limit": max(limits, key=limits.__getitem__),
            "evaluation_share": self._evaluation_share(sized.batch_size, compute + exchange),
            "start_s": ranks * _FILE_OPERATIONS / self.file_operations_per_second,
        }

    def _evaluation_share(self, batch_size: int, step_seconds: float) -> float:
        """Return the share of an epoch on PTB in which only rank 0 works, and evaluates."""
        config = self.config
        tokens = config.batch_size * config.num_steps
        seconds_per_token = self.compute[part_of_rank(config, 1)] / tokens
        evaluation = _FORWARD_SHARE * seconds_per_token * _PTB_TOKENS["valid"]
        training = step_seconds * _PTB_TOKENS["train"] / (batch_size * config.num_steps)
        return evaluation / (evaluation + training)


def part_of_rank(config: Config, ranks: int) -> Part:
    """Return the part of a global batch that one of N ranks computes."""
    count = config.virtual_ranks or VIRTUAL_RANKS
    return Part(-(-config.batch_size // ranks), max(count // ranks, 1))


def measure(config: Config, options: AdviceOptions) -> dict[str, Any]:
    """Measure the steps of one rank and an exchange between two ranks, and predict step times."""
    counts = {"strong": [n for n in _RANKS if n <= config.batch_size]}
    counts["weak"] = [n for n in _RANKS if n * config.batch_size <= MAX_ROWS]
    shapes = run([Task(config)], options)[0]["shapes"]
    sizes = message_bytes(config, shapes)
    parts = {
        part_of_rank(scaled_config(config, kind, n), n) for kind in KINDS for n in counts[kind]
    }
    tasks = {part: Task(replace(config, **part._asdict())) for part in sorted(parts)}
    exchange_task = Task(config, "exchange", 2, message_bytes=sizes)
    results = take_turns([{"exchange": exchange_task}, tasks], options)
    exchange = results.pop("exchange")
    empty, full = median(exchange["empty"]), median(exchange["full"])
    per_byte = max(full - empty, 0.0) / bytes_sent(sum(sizes), 2)
    predictor = Predictor(
        config,
        shapes,
        {part: median(result["seconds"]) for part, result in results.items()},
        fixed=empty,
        seconds_per_byte=per_byte + 8e-9 / options.link_gbps,
        latency=options.link_latency_us * 1e-6,
        file_operations_per_second=options.file_operations_per_second,
        ranks_at_once=options.cores / options.threads if options.cores else math.inf,
    )
    predictions = [predictor.predict(kind, ranks) for kind in KINDS for ranks in counts[kind]]
    slower = [row for row in predictions if row["ranks"] > 1 >= row["speedup"]]
    if slower:
        names = ", ".join(f"{row['ranks']} ({row['scaling']} scaling)" for row in slower)
        logger.warning("ONE RANK WINS against %s", names)
    return {
        "exchange_ms_per_step": 1e3 * empty,
        "exchange_ms_per_mb": 1e9 * per_byte,
        "predictions": predictions,
    }
