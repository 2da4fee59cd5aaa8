"""`scaling`: several ranks against one, and where the time of a step goes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from lm.benchmark import options, results
from lm.benchmark.messages import messages_of_step
from lm.benchmark.plots import lines, plot
from lm.benchmark.statistics import paired_ratio, summarize
from lm.benchmark.workers import Worker
from lm.cli.flags import Flags
from lm.cli.tables import markdown_table
from lm.config import Config
from lm.errors import UserError

_REPEAT_SECONDS = 2.0

_logger = logging.getLogger("lm")


class ScalingBenchmark(NamedTuple):
    """What is measured."""

    config: Config
    ranks: list[int]
    hosts: Optional[str]
    threads: int
    repeats: int
    steps_per_repeat: Optional[int]
    untimed_steps: int
    data_path: Optional[str]
    out: str


def parse(argv: Sequence[str]) -> ScalingBenchmark:
    """Turn the command line into a benchmark."""
    flags = Flags(
        "Measure 1, 2, ... ranks, each with the same number of threads: strong scaling (the same\n"
        "global batch) and weak scaling (the same rows a rank).\n"
        "\n"
        "  python -m lm.benchmark scaling --config config_small --ranks 1,2,4\n"
        "  python -m lm.benchmark scaling --ranks 1,2 --hosts host1:1,host2:1"
    )
    options.define_ranks(flags)
    options.define_common(flags, repeats=10)
    options.define_training(flags)
    flags.parse(argv)
    options.positive(flags, "repeats", "intra_op_threads", "steps_per_repeat")
    config, ranks = options.config_of(flags), options.parse_ranks(flags["ranks"])
    if ranks[-1] > config.batch_size:
        raise UserError(f"batch_size is {config.batch_size} but there are {ranks[-1]} ranks")
    results.make_directory(flags["out"])
    return ScalingBenchmark(
        config=config,
        ranks=ranks,
        hosts=flags["hosts"],
        threads=options.choose_threads(flags, options.ranks_per_host(ranks[-1], flags["hosts"])),
        repeats=flags["repeats"],
        steps_per_repeat=flags["steps_per_repeat"],
        untimed_steps=flags["untimed_steps"],
        data_path=flags["data_path"],
        out=flags["out"],
    )


class Group:
    """Some ranks that train this project's model.

    Args:
      benchmark: What is measured.
      ranks: Number of ranks.
      batch_sizes: Global batches that will be measured.
    """

    def __init__(self, benchmark: ScalingBenchmark, ranks: int, batch_sizes: Sequence[int]):
        _logger.info("starting %d rank(s)", ranks)
        self._benchmark = benchmark
        self.worker = Worker(
            "StepServer",
            {
                "contestant": "ours",
                "config": dataclasses.asdict(benchmark.config),
                "threads": benchmark.threads,
                "batch_sizes": sorted(set(batch_sizes)),
                "data_path": benchmark.data_path,
            },
            ranks=ranks,
            threads=benchmark.threads,
            hosts=benchmark.hosts,
        )
        self._counts: dict[tuple, int] = {}

    def measure(self, batch_size: int, exchange: bool = True) -> dict[str, float]:
        """Return `seconds` and `input_seconds` of a step on the slowest rank."""
        request = dict(
            batch_size=batch_size, exchange=exchange, untimed=self._benchmark.untimed_steps
        )
        kind = (batch_size, exchange)
        if kind not in self._counts:
            warm = self.worker.ask("steps", count=3, **request)[0]["seconds"]
            self._counts[kind] = self._benchmark.steps_per_repeat or options.steps_in(
                _REPEAT_SECONDS, warm
            )
        by_rank = self.worker.ask("steps", count=self._counts[kind], **request)
        return {name: max(each[name] for each in by_rank) for name in ("seconds", "input_seconds")}


def run(benchmark: ScalingBenchmark) -> None:
    """Measure, print, and write the results."""
    facts = results.environment_facts()
    batch_size = benchmark.config.batch_size
    shares = {n: -(-batch_size // n) for n in benchmark.ranks}  # rows of the busiest rank
    with contextlib.ExitStack() as stack:
        alone = Group(benchmark, 1, [batch_size, *shares.values()])
        stack.callback(alone.worker.close)
        vocab_size = alone.worker.ask("vocab_size")[0]
        rows = [_measure_ranks(benchmark, n, alone, shares[n], vocab_size) for n in shares]
    record = {
        **facts,
        "benchmark": "scaling",
        "config": dataclasses.asdict(benchmark.config),
        "precision": benchmark.config.precision,
        "threads_per_rank": benchmark.threads,
        "hosts": benchmark.hosts,
        "vocab_size": vocab_size,
        "repeats": benchmark.repeats,
        "ranks": rows,
    }
    _print(record)
    stem = f"scaling-{benchmark.config.name}-{benchmark.config.precision}"
    results.write_json(benchmark.out, stem, record)
    _plot(benchmark.out, stem, rows, benchmark.config)


def _measure_ranks(
    benchmark: ScalingBenchmark, ranks: int, alone: Group, share: int, vocab_size: int
) -> dict[str, Any]:
    """Measure N ranks and one rank in turn, so that drift of the machine meets both."""
    strong, weak = benchmark.config.batch_size, ranks * benchmark.config.batch_size
    found: dict[str, list] = {}

    def note(name: str, measured: dict[str, float]) -> None:
        found.setdefault(name, []).append(measured)

    with contextlib.ExitStack() as stack:
        together = alone
        if ranks > 1:
            together = Group(benchmark, ranks, [strong, weak])
            stack.callback(together.worker.close)
        for repeat in range(benchmark.repeats):
            note("one", alone.measure(strong))
            if ranks > 1:
                note("strong", together.measure(strong))
                note("share", alone.measure(share))
                note("weak", together.measure(weak))
                note("strong_compute", together.measure(strong, exchange=False))
                note("weak_compute", together.measure(weak, exchange=False))
            _logger.info("%d rank(s), repeat %d of %d", ranks, repeat + 1, benchmark.repeats)
    if ranks == 1:
        one = found["one"]
        found = dict.fromkeys(["one", "share", *_KINDS, *(f"{k}_compute" for k in _KINDS)], one)
    return _rank_record(benchmark.config, vocab_size, ranks, found)


_KINDS = ("strong", "weak")


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
        f"\n{config['name']}, {record['precision']}, {record['threads_per_rank']} thread(s) a rank,"
        f" global batch {config['batch_size']} x {config['num_steps']}, {record['repeats']} repeats"
    )
    header = ["scaling", "ranks", "rows", "words/s", "std", "speed-up [95 %]", "efficiency"]
    header += ["MB sent a rank", "compute ms", "exchange ms", "input ms"]
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
        split.set_xlabel("ms a step")
