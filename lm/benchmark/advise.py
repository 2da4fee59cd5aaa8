"""`advise`: what more ranks will bring, on this host and on a cluster, before the launch."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple, Optional

from lm.benchmark import options, results
from lm.benchmark.advise_report import plot_advice, print_advice
from lm.benchmark.exchange import measure_horovod
from lm.benchmark.messages import messages_of_step
from lm.benchmark.prediction import ALGORITHMS, HostCosts, Link, Predictor, fit_host_costs
from lm.benchmark.scaling import Group
from lm.benchmark.statistics import summarize
from lm.benchmark.workers import Worker
from lm.cli.flags import Flags
from lm.config import Config
from lm.errors import UserError

_EMPTY = 4  # bytes; Horovod has no smaller message

_logger = logging.getLogger("lm")


class Advice(NamedTuple):
    """What is measured and predicted."""

    config: Config
    ranks: list[int]
    hosts: Optional[str]
    threads: int
    repeats: int
    steps_per_repeat: Optional[int]
    untimed_steps: int
    data_path: Optional[str]
    link: Link
    algorithm: str
    max_ranks: int
    out: str


def parse(argv: Sequence[str]) -> Advice:
    """Turn the command line into a benchmark."""
    flags = Flags(
        "Predict the speed-up of more ranks from one rank's step and the exchange, measured here;\n"
        "check it against the measured --ranks; predict a cluster with one rank a host.\n"
        "\n"
        "  python -m lm.benchmark advise --config config_small --ranks 1,2 --link_gbps 25"
    )
    options.define_ranks(flags)
    flags.define(float, "link_latency_us", 25.0, "latency between hosts (default: 25)")
    flags.define(float, "link_gbps", 10.0, "bandwidth between hosts, 10^9 bit/s (default: 10)")
    flags.define(
        str, "algorithm", "ring", f"the cluster's allreduce: {' or '.join(ALGORITHMS)}"
        " (default: ring; halving takes fewer hops on many ranks)",
    )  # fmt: skip
    flags.define(int, "max_ranks", 4096, "largest cluster to predict (default: 4096)")
    options.define_common(flags, repeats=5)
    options.define_training(flags)
    flags.parse(argv)
    options.positive(flags, "repeats", "intra_op_threads", "steps_per_repeat", "max_ranks")
    config, ranks = options.config_of(flags), options.parse_ranks(flags["ranks"])
    if not 2 <= ranks[-1] <= config.batch_size:
        raise UserError(f"the largest of ranks must be from 2 to batch_size, not {ranks[-1]}")
    if not (flags["link_latency_us"] >= 0 and flags["link_gbps"] > 0):
        raise UserError("link_latency_us must be at least 0, and link_gbps greater than 0")
    if flags["algorithm"] not in ALGORITHMS:
        raise UserError(f"algorithm must be one of {', '.join(ALGORITHMS)}")
    results.make_directory(flags["out"])
    return Advice(
        config=config,
        ranks=ranks,
        hosts=flags["hosts"],
        threads=options.choose_threads(flags, options.ranks_per_host(ranks[-1], flags["hosts"])),
        repeats=flags["repeats"],
        steps_per_repeat=flags["steps_per_repeat"],
        untimed_steps=flags["untimed_steps"],
        data_path=flags["data_path"],
        link=Link(flags["link_latency_us"] * 1e-6, 8e-9 / flags["link_gbps"]),
        algorithm=flags["algorithm"],
        max_ranks=flags["max_ranks"],
        out=flags["out"],
    )


def run(advice: Advice) -> None:
    """Measure, predict, check, print, and write the results."""
    facts = results.environment_facts()
    vocab_size, compute, measured = _measure_steps(advice)
    costs = _measure_exchange(advice, vocab_size)
    predictor = Predictor(advice.config, vocab_size, compute, costs)
    here = {
        kind: [
            {**predictor.predict(ranks, kind, Link(), "ring"), **measured[ranks][kind]}
            for ranks in advice.ranks
        ]
        for kind in ("strong", "weak")
    }
    for each in (*here["strong"], *here["weak"]):
        each["error"] = each["step_ms"] / each["measured_step_ms"] - 1
    powers = _powers_of_two(advice.max_ranks)
    cluster = {
        kind: [predictor.predict(n, kind, advice.link, advice.algorithm) for n in ranks]
        for kind, ranks in {
            "strong": [n for n in powers if n <= advice.config.batch_size],
            "weak": powers,
        }.items()
    }
    record = {
        **facts,
        "benchmark": "advise",
        "config": dataclasses.asdict(advice.config),
        "precision": advice.config.precision,
        "threads_per_rank": advice.threads,
        "hosts": advice.hosts,
        "link": advice.link,
        "algorithm": advice.algorithm,
        "exchange_costs": costs,
        "here": here,
        "cluster": cluster,
        "warnings": _warnings(here, cluster),
    }
    print_advice(record)
    stem = f"advise-{advice.config.name}-{advice.config.precision}"
    results.write_json(advice.out, stem, record)
    plot_advice(advice.out, stem, record)


def _powers_of_two(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]


def _measure_steps(advice: Advice) -> tuple[int, dict[int, float], dict[int, dict]]:
    """Measure one rank with all shares of the batch, and beside it the ranks to check.

    Returns:
      The vocabulary's size; rows -> seconds of a step alone; ranks -> kind -> measured step.
    """
    batch_size = advice.config.batch_size
    counts = {*advice.ranks, *(n for n in _powers_of_two(advice.max_ranks) if n <= batch_size)}
    shares = sorted({-(-batch_size // ranks) for ranks in counts} | {batch_size})
    compute: dict[int, list[float]] = {rows: [] for rows in shares}
    together: dict[tuple[int, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        alone = Group(advice, 1, shares)
        stack.callback(alone.worker.close)
        vocab_size = alone.worker.ask("vocab_size")[0]
        groups = {1: alone}
        for ranks in advice.ranks:
            if ranks > 1:
                groups[ranks] = Group(advice, ranks, [batch_size, ranks * batch_size])
                stack.callback(groups[ranks].worker.close)
        for repeat in range(advice.repeats):
            for rows in shares:
                compute[rows].append(alone.measure(rows)["seconds"])
            for ranks, group in groups.items():
                for kind, size in (("strong", batch_size), ("weak", ranks * batch_size)):
                    seconds = group.measure(size)["seconds"]
                    together.setdefault((ranks, kind), []).append(seconds)
            _logger.info("steps, repeat %d of %d", repeat + 1, advice.repeats)
    medians = {rows: summarize(seconds).median for rows, seconds in compute.items()}
    measured: dict[int, dict] = {}
    for (ranks, kind), seconds in together.items():
        step = summarize(seconds).median
        work = ranks if kind == "weak" else 1
        measured.setdefault(ranks, {})[kind] = {
            "measured_step_ms": 1000 * step,
            "measured_speedup": work * medians[batch_size] / step,
        }
    return vocab_size, medians, measured


def _measure_exchange(advice: Advice, vocab_size: int) -> HostCosts:
    ranks = min(n for n in advice.ranks if n > 1)
    messages = messages_of_step(advice.config, vocab_size)
    # An allreduce of half the bytes sends as many as an allgather.
    sizes = [each.bytes // (2 if each.collective == "allgather" else 1) for each in messages]
    plans = ([_EMPTY], [_EMPTY] * len(sizes), sizes)
    found: list[list[float]] = [[] for _ in plans]
    options_ = dict(ranks=ranks, threads=advice.threads, hosts=advice.hosts)
    with Worker("ExchangeServer", {}, **options_) as worker:
        for repeat in range(advice.repeats):
            for plan, seconds in zip(plans, found):
                seconds.append(measure_horovod(worker, plan))
            _logger.info("exchange, repeat %d of %d", repeat + 1, advice.repeats)
    one, many, step = (summarize(seconds).median for seconds in found)
    bytes_sent = sum(message.bytes_sent(ranks) for message in messages)
    return fit_host_costs(one, many, step, len(messages), bytes_sent)


def _warnings(here: dict[str, list], cluster: dict[str, list]) -> list[str]:
    """Say where one rank wins, and where more ranks than some only cost."""
    found = []
    for place, predictions in (("on this host", here), ("on the cluster", cluster)):
        for kind, rows in predictions.items():
            slower = [row["ranks"] for row in rows if row["ranks"] > 1 and row["speedup"] <= 1]
            best = max(rows, key=lambda row: row["speedup"])
            if slower:
                named = ", ".join(map(str, slower))
                found.append(f"{place}, {kind} scaling: ONE RANK WINS against {named} ranks")
            if best["ranks"] < rows[-1]["ranks"]:
                found.append(
                    f"{place}, {kind} scaling: {best['ranks']} rank(s) are the fastest,"
                    f" {best['speedup']:.2f}x one"
                )
    return found
