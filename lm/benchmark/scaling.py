"""`scaling`: several ranks against one, and where the time of a step goes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

from lm.benchmark import results
from lm.benchmark.messages import messages_of_step
from lm.benchmark.options import ScalingOptions
from lm.benchmark.plots import lines, plot
from lm.benchmark.statistics import paired_ratio, summarize
from lm.benchmark.trainer import Trainer
from lm.cli.tables import markdown_table
from lm.config import Config

_logger = logging.getLogger("lm")
_KINDS = ("strong", "weak")


def run(config: Config, options: ScalingOptions) -> None:
    """Measure, print, and write the results."""
    facts = results.environment_facts()
    batch_size = config.batch_size
    shares = {n: -(-batch_size // n) for n in options.rank_counts}  # rows of the busiest rank
    with contextlib.ExitStack() as stack:
        _logger.info("starting 1 rank")
        alone = Trainer(config, options, [batch_size, *shares.values()])
        stack.callback(alone.worker.close)
        vocab_size = alone.worker.ask("vocab_size")[0]
        rows = [
            _rank_record(config, vocab_size, n, _measure(config, options, n, alone, share))
            for n, share in shares.items()
        ]
    record = {
        **facts,
        "benchmark": "scaling",
        "config": dataclasses.asdict(config),
        "precision": config.precision,
        "threads_per_rank": options.threads,
        "hosts": options.hosts,
        "vocab_size": vocab_size,
        "repeats": options.repeats,
        "ranks": rows,
    }
    _print(record)
    stem = f"scaling-{config.name}-{config.precision}"
    results.write_json(options.out, stem, record)
    _plot(options.out, stem, rows, config)


def _measure(
    config: Config, options: ScalingOptions, ranks: int, alone: Trainer, share: int
) -> dict[str, list]:
    """Measure N ranks and one rank in turn, so that drift of the machine meets both."""
    strong, weak = config.batch_size, ranks * config.batch_size
    found: dict[str, list] = {}

    def note(name: str, measured: dict[str, float]) -> None:
        found.setdefault(name, []).append(measured)

    with contextlib.ExitStack() as stack:
        together = alone
        if ranks > 1:
            _logger.info("starting %d ranks", ranks)
            together = Trainer(config, options, [strong, weak], ranks)
            stack.callback(together.worker.close)
        for repeat in range(options.repeats):
            note("one", alone.measure(strong))
            if ranks > 1:
                note("strong", together.measure(strong))
                note("share", alone.measure(share))
                note("weak", together.measure(weak))
                note("strong_compute", together.measure(strong, exchange=False))
                note("weak_compute", together.measure(weak, exchange=False))
            _logger.info("%d rank(s), repeat %d of %d", ranks, repeat + 1, options.repeats)
    if ranks == 1:
        one = found["one"]
        found = dict.fromkeys(["one", "share", *_KINDS, *(f"{k}_compute" for k in _KINDS)], one)
    return found


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
        ratio = paired_ratio(seconds["one"], seconds[kind])
        work = batch_size / config.batch_size
        speedup = type(ratio)(*(work * value for value in ratio))
        step = summarize(seconds[kind]).median
        inputs = summarize([each["input_seconds"] for each in found[kind]]).median
        compute = summarize(seconds[f"{kind}_compute"]).median - inputs
        record[kind] = {
            "batch_size": batch_size,
            "words_per_second": summarize([words / each for each in seconds[kind]]),
            "speedup": speedup,
            "efficiency": type(ratio)(*(value / ranks for value in speedup)),
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


def _print(record: dict[str, Any]) -> None:
    config = record["config"]
    print(
        f"\n{config['name']}, {record['precision']}, {record['threads_per_rank']} thread(s) per"
        f" rank, global batch {config['batch_size']} x {config['num_steps']},"
        f" {record['repeats']} repeats"
    )
    header = ["scaling", "ranks", "rows", "words/s", "std", "speed-up [95 %]", "efficiency"]
    header += ["MB sent per rank", "compute ms", "exchange ms", "input ms"]
    rows = []
    for kind in _KINDS:
        for each in record["ranks"]:
            found = each[kind]
            rows.append(
                [
                    kind,
                    str(each["ranks"]),
                    str(found["batch_size"]),
                    f"{found['words_per_second'].mean:.0f}",
                    f"{found['words_per_second'].std:.0f}",
                    str(found["speedup"]),
                    f"{found['efficiency'].value:.2f}",
                    f"{found['bytes_sent_per_rank'] / 1e6:.2f}",
                    *(
                        f"{found['split_ms'][part]:.2f}"
                        for part in ("compute", "exchange", "input")
                    ),
                ]
            )
    print(markdown_table(header, rows))
    for each in record["ranks"]:
        if each["ranks"] > 1:
            print(
                f"strong scaling, {each['ranks']} ranks: efficiency against compute alone"
                f" {each['efficiency_against_compute']}"
            )


def _plot(out: str, stem: str, rows: list[dict], config: Config) -> None:
    title = f"{config.name}, {config.precision}: strong and weak scaling"
    ranks = [row["ranks"] for row in rows]
    with plot(out, stem, title, num_axes=2) as (speed, split):
        series = {kind: [row[kind]["speedup"].value for row in rows] for kind in _KINDS}
        lines(speed, ranks, {**series, "ideal": ranks}, "ranks", "speed-up over one rank")
        names = [f"{kind}, {row['ranks']}" for kind in _KINDS for row in rows]
        left = [0.0] * len(names)
        for part in ("compute", "exchange", "input"):
            widths = [row[kind]["split_ms"][part] for kind in _KINDS for row in rows]
            split.barh(names, widths, left=left, label=part, height=0.6)
            left = [a + b for a, b in zip(left, widths)]
        split.invert_yaxis()
        split.set_xlabel("ms per step")
