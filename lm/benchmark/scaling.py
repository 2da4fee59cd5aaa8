"""`scaling`: several ranks against one, and where the time of a step goes."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import Any

from lm.benchmark.messages import messages_of_step
from lm.benchmark.options import ScalingOptions
from lm.benchmark.plots import lines, plot
from lm.benchmark.results import print_table
from lm.benchmark.statistics import paired_ratio, summarize
from lm.benchmark.trainer import Trainer, in_turn
from lm.config import Config

STEM = "scaling-{config[name]}-{precision}"
_KINDS = ("strong", "weak")
_PARTS = ("compute", "exchange", "input")  # of a step

_COLUMNS = [
    ("scaling", "{kind}"),
    ("ranks", "{ranks}"),
    ("rows", "{batch_size}"),
    ("words/s", "{words_per_second.mean:.0f}"),
    ("std", "{words_per_second.std:.0f}"),
    ("speed-up [95 %]", "{speedup}"),
    ("efficiency", "{efficiency.value:.2f}"),
    ("MB sent per rank", "{mb_sent_per_rank:.2f}"),
    *((f"{part} ms", f"{{split_ms[{part}]:.2f}}") for part in _PARTS),
]

logger = logging.getLogger("lm")


def measure(config: Config, options: ScalingOptions) -> dict[str, Any]:
    """Measure each number of ranks beside one rank."""
    shares = {n: -(-config.batch_size // n) for n in options.rank_counts}  # of the busiest rank
    logger.info("starting 1 rank")
    with Trainer(config, options, [config.batch_size, *shares.values()]) as alone:
        vocab_size = alone.ask("vocab_size")[0]
        ranks = [
            _rank_record(config, vocab_size, n, _measure_ranks(config, options, n, alone, share))
            for n, share in shares.items()
        ]
    return {
        "config": dataclasses.asdict(config),
        "precision": config.precision,
        "threads_per_rank": options.threads,
        "hosts": options.hosts,
        "vocab_size": vocab_size,
        "repeats": options.repeats,
        "ranks": ranks,
    }


def _measure_ranks(
    config: Config, options: ScalingOptions, ranks: int, alone: Trainer, share: int
) -> dict[str, list[dict]]:
    one = partial(alone.measure, config.batch_size)
    if ranks == 1:
        found = in_turn(options.repeats, {"one": one}, "1 rank(s)")["one"]
        return dict.fromkeys(["one", "share", *_KINDS, *(f"{k}_compute" for k in _KINDS)], found)
    strong, weak = config.batch_size, ranks * config.batch_size
    logger.info("starting %d ranks", ranks)
    with Trainer(config, options, [strong, weak], ranks) as together:
        measurements = {
            "one": one,
            "strong": partial(together.measure, strong),
            "share": partial(alone.measure, share),
            "weak": partial(together.measure, weak),
            "strong_compute": partial(together.measure, strong, exchange=False),
            "weak_compute": partial(together.measure, weak, exchange=False),
        }
        return in_turn(options.repeats, measurements, f"{ranks} rank(s)")


def _rank_record(config: Config, vocab_size: int, ranks: int, found: dict[str, list]) -> dict:
    seconds = {name: [each["seconds"] for each in runs] for name, runs in found.items()}
    record: dict[str, Any] = {
        "ranks": ranks,
        # What each rank would need if the exchange took no time and the others did not disturb.
        "efficiency_against_compute": paired_ratio(seconds["share"], seconds["strong"]),
        "seconds_per_step": seconds,
    }
    for kind in _KINDS:
        batch_size = config.batch_size * (ranks if kind == "weak" else 1)
        words = batch_size * config.num_steps
        sized = dataclasses.replace(config, batch_size=batch_size)
        messages = messages_of_step(sized, vocab_size) if ranks > 1 else []
        work = batch_size / config.batch_size
        speedup = paired_ratio(seconds["one"], seconds[kind]).scaled(work)
        step = summarize(seconds[kind]).median
        inputs = summarize([each["input_seconds"] for each in found[kind]]).median
        compute = summarize(seconds[f"{kind}_compute"]).median - inputs
        record[kind] = {
            "batch_size": batch_size,
            "words_per_second": summarize([words / each for each in seconds[kind]]),
            "speedup": speedup,
            "efficiency": speedup.scaled(1 / ranks),
            "bytes_in_messages": sum(message.bytes for message in messages),
            "bytes_sent_per_rank": sum(message.bytes_sent(ranks) for message in messages),
            # Compute: the same ranks at the same time, without the exchange.
            "split_ms": {
                "input": 1000 * inputs,
                "compute": 1000 * compute,
                "exchange": 1000 * max(step - compute - inputs, 0.0),
            },
        }
    return record


def show(record: dict[str, Any]) -> None:
    """Print one row per kind of scaling and number of ranks."""
    config = record["config"]
    print(
        f"\n{config['name']}, {record['precision']}, {record['threads_per_rank']} thread(s) per"
        f" rank, global batch {config['batch_size']} x {config['num_steps']},"
        f" {record['repeats']} repeats"
    )
    rows = [
        {
            "kind": kind,
            "ranks": each["ranks"],
            "mb_sent_per_rank": each[kind]["bytes_sent_per_rank"] / 1e6,
            **each[kind],
        }
        for kind in _KINDS
        for each in record["ranks"]
    ]
    print_table(_COLUMNS, rows)
    for each in record["ranks"]:
        if each["ranks"] > 1:
            print(
                f"strong scaling, {each['ranks']} ranks: efficiency against compute alone"
                f" {each['efficiency_against_compute']}"
            )


def draw(stem: str, record: dict[str, Any]) -> None:
    """Plot the speed-ups and the parts of a step into `stem.png` and `stem.pdf`."""
    title = f"{record['config']['name']}, {record['precision']}: strong and weak scaling"
    rows = record["ranks"]
    ranks = [row["ranks"] for row in rows]
    with plot(stem, title, num_axes=2) as (speed, split):
        series = {kind: [row[kind]["speedup"].value for row in rows] for kind in _KINDS}
        lines(speed, ranks, {**series, "ideal": ranks}, "ranks")
        names = [f"{kind}, {row['ranks']}" for kind in _KINDS for row in rows]
        left = [0.0] * len(names)
        for part in _PARTS:
            widths = [row[kind]["split_ms"][part] for kind in _KINDS for row in rows]
            split.barh(names, widths, left=left, label=part, height=0.6)
            left = [a + b for a, b in zip(left, widths)]
        split.invert_yaxis()
        split.set_xlabel("ms per step")
