"""Compare several ranks with one rank: strong and weak scaling, and the parts of a step.

  python -m lm.benchmark scaling --config config_small --ranks 1,2,4
  python -m lm.benchmark scaling --ranks 1,2 --hosts host1:1,host2:1

Strong scaling keeps the global batch. Weak scaling keeps the rows of each rank. Each rank has the
same number of threads. The time of the exchange excludes the part that overlaps with computation.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lm.benchmark.turns import RepeatedOptions, paired_ratio, speeds, take_turns
from lm.benchmark.worker import Task
from lm.config import Config
from lm.data.batches import rows_of_rank
from lm.distributed.cores import claim_cores
from lm.distributed.mpirun import slots_of_hosts
from lm.errors import UserError
from lm.options import option
from lm.tensorflow_import import import_tensorflow

KINDS = ("strong", "weak")


@dataclasses.dataclass(frozen=True)
class ScalingOptions(RepeatedOptions):
    """Options of `scaling`."""

    ranks: str = option("1,2", "comma-separated rank counts")
    hosts: str | None = option(None, "like mpirun -H: host1:1,host2:1 (default: this host)")

    @property
    def rank_counts(self) -> list[int]:
        """The rank counts in ascending order."""
        if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", self.ranks):
            raise UserError(f"ranks must be positive integers like 1,2,4, not {self.ranks!r}")
        return sorted({int(count) for count in self.ranks.split(",")})

    @property
    def threads(self) -> int:
        """Threads of each rank. By default, the ranks of a host divide its cores."""
        ranks = self.rank_counts[-1]
        if self.hosts:
            ranks = min(ranks, max(slots_of_hosts(self.hosts)))
        return self.intra_op_threads or max(claim_cores() // ranks, 1)

    def check(self, config: Config) -> None:
        super().check(config)
        rows_of_rank(config.batch_size, 0, self.rank_counts[-1])  # raises if there are too few rows
        if self.hosts and (slots := sum(slots_of_hosts(self.hosts))) < self.rank_counts[-1]:
            raise UserError(
                f"hosts {self.hosts} have {slots} slots, too few for {self.rank_counts[-1]} ranks:"
                " use host1:2,host2:2, or start fewer ranks"
            )


def measure(config: Config, options: ScalingOptions) -> dict[str, Any]:
    """Measure all rank counts in turn."""
    # One rank is measured once, for both kinds of scaling.
    groups = [{"one": Task(config)}] + [
        {(kind, ranks): Task(scaled_config(config, kind, ranks), ranks=ranks) for kind in KINDS}
        for ranks in options.rank_counts
        if ranks > 1
    ]
    results = take_turns(groups, options, options.hosts)
    one = results["one"]
    pairs = [(kind, ranks) for kind in KINDS for ranks in options.rank_counts]
    return {
        "device": one["device"][0],
        "vocab_size": one["vocab_size"][0],
        "rows": [_row(config, *pair, one, results.get(pair, one)) for pair in pairs],
    }


def scaled_config(config: Config, kind: str, ranks: int) -> Config:
    """Return the config with the global batch of N ranks: "strong" keeps it, "weak" grows it."""
    work = ranks if kind == "weak" else 1
    return dataclasses.replace(config, batch_size=work * config.batch_size)


def message_bytes(config: Config, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the sizes of the gradients that the ranks exchange in a step.

    `shapes` are the shapes of the trainable variables. The embedding's gradient is dense, or
    contains the rows and IDs of all tokens of the global batch. A tied embedding also receives a
    dense gradient from the output layer. Ranks sum dense gradients (allreduce) and gather rows
    (allgather). An allgather sends half as many bytes, so the sizes of rows and IDs are halved.
    """
    import_tensorflow()  # imported here, because `--help` does not need TensorFlow
    from lm.optimize.sparse import dense_is_smaller

    tokens = config.batch_size * config.num_steps
    sizes = []
    for name, shape in shapes.items():
        dense = 4 * math.prod(shape)
        is_table = name == "embedding" or name.startswith("embedding/band_")
        if is_table and not dense_is_smaller(shape[0], tokens):
            sizes += [tokens * shape[1] * 4 // 2, tokens * 4 // 2]
        else:
            sizes.append(dense)
        if is_table and config.tie_weights:
            sizes.append(dense)
    return sizes


def bytes_sent(size: float, ranks: int) -> float:
    """Return the bytes that each of N ranks sends in an allreduce: 2 (N - 1) / N of its size."""
    return 2 * (ranks - 1) / ranks * size


def _row(
    config: Config, kind: str, ranks: int, one: Mapping[str, list], result: Mapping[str, list]
) -> dict[str, Any]:
    """Return the results of N ranks, compared with the results of one rank."""
    seconds = result["seconds"]
    sized = scaled_config(config, kind, ranks)
    speedup = paired_ratio(one["seconds"], seconds, sized.batch_size / config.batch_size)
    exchanged = sum(message_bytes(sized, one["shapes"][0]))
    row = {
        "scaling": kind,
        "ranks": ranks,
        "batch_size": sized.batch_size,
        **speeds(sized.batch_size * sized.num_steps, seconds),
        "speedup": speedup,
        "efficiency": speedup.value / ranks,
        "mb_sent_per_rank": bytes_sent(exchanged, ranks) / 1e6,
        "seconds_per_step": seconds,
    }
    # A GPU computes after TensorFlow has started its operations, so its parts cannot be timed.
    if one["device"][0].startswith("GPU"):
        return row
    exchange_ms = 1000 * median(result["exchange_seconds"])
    compute_ms = 1000 * median(seconds) - exchange_ms
    return {**row, "compute_ms": compute_ms, "exchange_ms": exchange_ms}
