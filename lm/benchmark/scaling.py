"""`scaling`: several ranks compared with one rank, and the parts of a step."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lm.benchmark import worker
from lm.benchmark.options import ScalingOptions
from lm.benchmark.turns import paired_ratio, print_table, summarize, take_turns
from lm.config import Config
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


def measure(config: Config, options: ScalingOptions) -> dict[str, Any]:
    """Measure each rank count in turn with one rank."""
    measurements = {"one": partial(worker.run, config, options)}
    counts = [ranks for ranks in options.rank_counts if ranks > 1]
    for ranks in counts:
        rows = dataclasses.replace(config, batch_size=-(-config.batch_size // ranks))
        measurements["alone", ranks] = partial(worker.run, rows, options)
        for kind in KINDS:
            sized = scaled_config(config, kind, ranks)
            measurements[kind, ranks] = partial(worker.run, sized, options, ranks=ranks)
    results = take_turns(options.repeats, measurements)
    results |= {(kind, 1): results["one"] for kind in KINDS if 1 in options.rank_counts}
    times = {name: [run["seconds"] for run in runs] for name, runs in results.items()}
    return {
        "threads_per_rank": options.threads,
        "device": results["one"][0]["device"],
        "vocab_size": results["one"][0]["vocab_size"],
        "rows": [
            _row(config, kind, ranks, results) for kind in KINDS for ranks in options.rank_counts
        ],
        # Compares with a rank that has the same rows, exchanges nothing and is not disturbed.
        "efficiency_against_compute": {
            ranks: paired_ratio(times["alone", ranks], times["strong", ranks]) for ranks in counts
        },
        "seconds_per_step": {str(name): each for name, each in times.items()},
    }


def scaled_config(config: Config, kind: str, ranks: int) -> Config:
    """Return the config with the global batch of N ranks: "strong" keeps it, "weak" grows it."""
    work = ranks if kind == "weak" else 1
    return dataclasses.replace(config, batch_size=work * config.batch_size)


def message_bytes(config: Config, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the sizes of the gradients that the ranks exchange in a step.

    The gradient of the embedding is dense, or consists of the rows and IDs of all tokens of the
    global batch. A tied embedding also receives a dense gradient from the output layer. Ranks sum
    dense gradients (allreduce) and collect rows (allgather), which sends half as many bytes: for
    rows, the result is the size of an allreduce that sends as many bytes.

    Args:
      config: The model and its global batch.
      shapes: Shapes of the trainable variables, by name.
    """
    import_tensorflow()  # not at the top of the module: `--help` needs no TensorFlow
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
        "speedup": speedup,
        "efficiency": speedup.scaled(1 / ranks),
        "mb_sent_per_rank": bytes_sent(size, ranks) / 1e6,
        "compute_ms": step_ms - exchange_ms - input_ms,
        "exchange_ms": exchange_ms,
        "input_ms": input_ms,
    }


def show(config: Config, options: ScalingOptions, record: dict[str, Any]) -> None:
    """Print one row for each kind of scaling and rank count."""
    print(
        f"\n{config.name}, {config.precision}, {options.threads} thread(s) per rank, global batch"
        f" {config.batch_size} x {config.num_steps}, {options.repeats} repeats"
    )
    # A GPU computes after its operations were started, so the times of the parts mean nothing.
    on_gpu = record["device"].startswith("GPU")
    print_table(_COLUMNS + ([] if on_gpu else _PART_COLUMNS), record["rows"])
    for ranks, ratio in record["efficiency_against_compute"].items():
        print(f"strong scaling, {ranks} ranks: efficiency against compute alone {ratio}")
