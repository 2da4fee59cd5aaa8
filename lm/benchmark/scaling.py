"""`scaling`: compare several ranks with one rank, and measure the parts of a step."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lm.benchmark import worker
from lm.benchmark.turns import paired_ratio, print_table, summarize, take_turns
from lm.config import Config
from lm.options import option
from lm.system import import_tensorflow

_FLOAT_BYTES = 4
KINDS = ("strong", "weak")
_COLUMNS = [
    ("scaling", "{kind}"),
    ("ranks", "{ranks}"),
    ("rows", "{batch_size}"),
    ("words/s", "{words_per_second.median:.0f}"),
    ("best", "{words_per_second.best:.0f}"),
    ("speedup [95 %]", "{speedup}"),
    ("efficiency", "{efficiency.value:.2f}"),
    ("MB sent per rank", "{mb_sent_per_rank:.2f}"),
]
_PART_COLUMNS = [
    ("compute ms", "{compute_ms:.2f}"),
    ("exchange ms", "{exchange_ms:.2f}"),
    ("input ms", "{input_ms:.2f}"),
]


@dataclasses.dataclass(frozen=True)
class ScalingOptions(worker.Options):
    """Compare several ranks with one rank: strong and weak scaling, and the parts of a step.

    Strong scaling keeps the global batch. Weak scaling keeps the rows of each rank. Each rank has
    the same number of threads. The exchange is the time that no computation hides.

    python -m lm.benchmark scaling --config config_small --ranks 1,2,4
    python -m lm.benchmark scaling --ranks 1,2 --hosts host1:1,host2:1
    """

    ranks: str = option("1,2", "comma-separated rank counts")
    hosts: str | None = option(None, "like mpirun -H: host1:1,host2:1 (default: this host)")


def measure(config: Config, options: ScalingOptions) -> dict[str, Any]:
    """Measure all rank counts in turn."""
    measurements = {"one": partial(worker.run, config, options)}
    for ranks in options.rank_counts:
        for kind in KINDS if ranks > 1 else ():
            sized = scaled_config(config, kind, ranks)
            measurements[kind, ranks] = partial(worker.run, sized, options, ranks=ranks)
    results = take_turns(options.repeats, measurements)
    results |= {(kind, 1): results["one"] for kind in KINDS if 1 in options.rank_counts}
    return {
        "threads_per_rank": options.threads,
        "device": results["one"][0]["device"],
        "vocab_size": results["one"][0]["vocab_size"],
        "rows": [
            _row(config, kind, ranks, results) for kind in KINDS for ranks in options.rank_counts
        ],
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
    from lm.training.gradients import dense_is_smaller

    tokens = config.batch_size * config.num_steps
    sizes = []
    for name, shape in shapes.items():
        dense = math.prod(shape) * _FLOAT_BYTES
        if name == "embedding" and not dense_is_smaller(config, shape[0]):
            sizes += [tokens * shape[1] * _FLOAT_BYTES // 2, tokens * _FLOAT_BYTES // 2]
        else:
            sizes.append(dense)
        if name == "embedding" and config.tie_weights:
            sizes.append(dense)
    return sizes


def bytes_sent(size: float, ranks: int) -> float:
    """Return the bytes that each of N ranks sends in an allreduce: 2 (N - 1) / N of its size."""
    return 2 * (ranks - 1) / ranks * size


def _row(
    config: Config, kind: str, ranks: int, results: Mapping[Any, list[dict]]
) -> dict[str, Any]:
    runs, one = results[kind, ranks], results["one"]
    sized = scaled_config(config, kind, ranks)
    words = sized.batch_size * sized.num_steps
    size = sum(message_bytes(sized, one[0]["shapes"]))
    seconds = [run["seconds"] for run in runs]
    speedup = paired_ratio([run["seconds"] for run in one], seconds)
    speedup = speedup.scaled(sized.batch_size / config.batch_size)
    step_ms, exchange_ms, input_ms = (
        1000 * statistics.median(run[name] for run in runs)
        for name in ("seconds", "exchange_seconds", "input_seconds")
    )
    return {
        "kind": kind,
        "ranks": ranks,
        "batch_size": sized.batch_size,
        "words_per_second": summarize([words / each for each in seconds], max),
        "seconds_per_step": seconds,
        "speedup": speedup,
        "efficiency": speedup.scaled(1 / ranks),
        "mb_sent_per_rank": bytes_sent(size, ranks) / 1e6,
        "compute_ms": step_ms - exchange_ms - input_ms,
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
