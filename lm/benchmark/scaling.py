"""`scaling`: compare several ranks with one rank, and measure the parts of a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lm.benchmark.turns import paired_ratio, print_table, speeds, take_turns
from lm.benchmark.worker import Options, Task
from lm.config import Config
from lm.options import option
from lm.system import import_tensorflow

KINDS = ("strong", "weak")
_COLUMNS = [
    ("scaling", "{kind}"),
    ("ranks", "{ranks}"),
    ("rows", "{batch_size}"),
    ("words/s", "{words_per_second:.0f}"),
    ("best", "{best:.0f}"),
    ("speedup [95 %]", "{speedup}"),
    ("efficiency", "{efficiency:.2f}"),
    ("MB sent per rank", "{mb_sent_per_rank:.2f}"),
]
_PART_COLUMNS = [
    ("compute ms", "{compute_ms:.2f}"),
    ("exchange ms", "{exchange_ms:.2f}"),
    ("input ms", "{input_ms:.2f}"),
]


@dataclasses.dataclass(frozen=True)
class ScalingOptions(Options):
    """Compare several ranks with one rank: strong and weak scaling, and the parts of a step.

    Strong scaling keeps the global batch. Weak scaling keeps the rows of each rank. Each rank has
    the same number of threads. The time of the exchange excludes the part that overlaps with
    computation.

    python -m lm.benchmark scaling --config config_small --ranks 1,2,4
    python -m lm.benchmark scaling --ranks 1,2 --hosts host1:1,host2:1
    """

    ranks: str = option("1,2", "comma-separated rank counts")
    hosts: str | None = option(None, "like mpirun -H: host1:1,host2:1 (default: this host)")


def measure(config: Config, options: ScalingOptions) -> dict[str, Any]:
    """Measure all rank counts in turn."""
    tasks = {"one": Task(config), **scaling_tasks(config, options.rank_counts)}
    results = take_turns(tasks, options)
    one = results["one"]
    results |= {(kind, 1): one for kind in KINDS}
    return {
        "threads_per_rank": options.threads,
        "device": one["device"][0],
        "vocab_size": one["vocab_size"][0],
        "rows": [
            _row(config, kind, ranks, results) for kind in KINDS for ranks in options.rank_counts
        ],
    }


def scaling_tasks(config: Config, rank_counts: Sequence[int]) -> dict[Any, Task]:
    """Return the steps of several ranks, by kind and rank count."""
    pairs = [(kind, ranks) for ranks in rank_counts for kind in KINDS if ranks > 1]
    return {pair: Task(scaled_config(config, *pair), ranks=pair[1]) for pair in pairs}


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
    from lm.training.gradients import dense_is_smaller

    tokens = config.batch_size * config.num_steps
    sizes = []
    for name, shape in shapes.items():
        dense = 4 * math.prod(shape)
        if name == "embedding" and not dense_is_smaller(config, shape[0]):
            sizes += [tokens * shape[1] * 4 // 2, tokens * 4 // 2]
        else:
            sizes.append(dense)
        if name == "embedding" and config.tie_weights:
            sizes.append(dense)
    return sizes


def bytes_sent(size: float, ranks: int) -> float:
    """Return the bytes that each of N ranks sends in an allreduce: 2 (N - 1) / N of its size."""
    return 2 * (ranks - 1) / ranks * size


def _row(
    config: Config, kind: str, ranks: int, results: Mapping[Any, dict[str, list]]
) -> dict[str, Any]:
    one, result = results["one"], results[kind, ranks]
    seconds = result["seconds"]
    sized = scaled_config(config, kind, ranks)
    speedup = paired_ratio(one["seconds"], seconds) * (sized.batch_size / config.batch_size)
    exchange_ms = 1000 * median(result["exchange_seconds"])
    input_ms = 1000 * median(result["input_seconds"])
    size = sum(message_bytes(sized, one["shapes"][0]))
    return {
        "kind": kind,
        "ranks": ranks,
        "batch_size": sized.batch_size,
        **speeds(sized.batch_size * sized.num_steps, seconds),
        "seconds_per_step": seconds,
        "speedup": speedup,
        "efficiency": speedup.value / ranks,
        "mb_sent_per_rank": bytes_sent(size, ranks) / 1e6,
        "compute_ms": 1000 * median(seconds) - exchange_ms - input_ms,
        "exchange_ms": exchange_ms,
        "input_ms": input_ms,
    }


def show(config: Config, options: ScalingOptions, record: dict[str, Any]) -> None:
    """Print a table of strong and weak scaling."""
    print(
        f"\n{config.name}, {config.precision}, {options.threads} thread(s) per rank, global batch"
        f" {config.batch_size} x {config.num_steps}, {options.repeats} repeats"
    )
    # A GPU computes after TensorFlow has started its operations, so its parts cannot be timed.
    on_gpu = record["device"].startswith("GPU")
    print_table(_COLUMNS + ([] if on_gpu else _PART_COLUMNS), record["rows"])
