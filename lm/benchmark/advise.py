"""`advise`: what more ranks will bring, on this host and on a cluster, before the launch."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any

from lm.benchmark import results
from lm.benchmark.exchange import measure_horovod, start_exchange
from lm.benchmark.messages import messages_of_step
from lm.benchmark.options import AdviceOptions
from lm.benchmark.plots import lines, plot
from lm.benchmark.prediction import HostCosts, Link, Predictor, fit_host_costs
from lm.benchmark.statistics import summarize
from lm.benchmark.trainer import Trainer
from lm.cli.tables import markdown_table
from lm.config import Config

_EMPTY = 4  # bytes; Horovod has no smaller message

_logger = logging.getLogger("lm")


def run(config: Config, options: AdviceOptions) -> None:
    """Measure, predict, check, print, and write the results."""
    facts = results.environment_facts()
    vocab_size, compute, measured = _measure_steps(config, options)
    costs = _measure_exchange(config, options, vocab_size)
    link = Link(options.link_latency_us * 1e-6, 8e-9 / options.link_gbps)
    predictor = Predictor(config, vocab_size, compute, costs)
    here = {
        kind: [
            {**predictor.predict(ranks, kind, Link(), "ring"), **measured[ranks][kind]}
            for ranks in options.rank_counts
        ]
        for kind in ("strong", "weak")
    }
    for each in (*here["strong"], *here["weak"]):
        each["error"] = each["step_ms"] / each["measured_step_ms"] - 1
    cluster = {
        kind: [predictor.predict(n, kind, link, options.algorithm) for n in ranks]
        for kind, ranks in {
            "strong": _powers_of_two(min(options.max_ranks, config.batch_size)),
            "weak": _powers_of_two(options.max_ranks),
        }.items()
    }
    record = {
        **facts,
        "benchmark": "advise",
        "config": dataclasses.asdict(config),
        "precision": config.precision,
        "threads_per_rank": options.threads,
        "hosts": options.hosts,
        "link": link,
        "algorithm": options.algorithm,
        "exchange_costs": costs,
        "here": here,
        "cluster": cluster,
        "warnings": _warnings(here, cluster),
    }
    _print(record)
    stem = f"advise-{config.name}-{config.precision}"
    results.write_json(options.out, stem, record)
    _plot(options.out, stem, record)


def _powers_of_two(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]


def _measure_steps(
    config: Config, options: AdviceOptions
) -> tuple[int, dict[int, float], dict[int, dict]]:
    """Measure one rank with all shares of the batch, and beside it the ranks to check.

    Returns:
      The vocabulary's size; rows -> seconds of a step alone; ranks -> kind -> measured step.
    """
    batch_size = config.batch_size
    counts = {*options.rank_counts, *_powers_of_two(min(options.max_ranks, batch_size))}
    shares = sorted({-(-batch_size // ranks) for ranks in counts} | {batch_size})
    compute: dict[int, list[float]] = {rows: [] for rows in shares}
    together: dict[tuple[int, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        alone = Trainer(config, options, shares)
        stack.callback(alone.worker.close)
        vocab_size = alone.worker.ask("vocab_size")[0]
        groups = {1: alone}
        for ranks in options.rank_counts:
            if ranks > 1:
                groups[ranks] = Trainer(config, options, [batch_size, ranks * batch_size], ranks)
                stack.callback(groups[ranks].worker.close)
        for repeat in range(options.repeats):
            for rows in shares:
                compute[rows].append(alone.measure(rows)["seconds"])
            for ranks, group in groups.items():
                for kind, size in (("strong", batch_size), ("weak", ranks * batch_size)):
                    seconds = group.measure(size)["seconds"]
                    together.setdefault((ranks, kind), []).append(seconds)
            _logger.info("steps, repeat %d of %d", repeat + 1, options.repeats)
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


def _measure_exchange(config: Config, options: AdviceOptions, vocab_size: int) -> HostCosts:
    ranks = min(n for n in options.rank_counts if n > 1)
    messages = messages_of_step(config, vocab_size)
    # An allreduce of half the bytes sends as many as an allgather.
    sizes = [each.bytes // (2 if each.collective == "allgather" else 1) for each in messages]
    plans = ([_EMPTY], [_EMPTY] * len(sizes), sizes)
    found: list[list[float]] = [[] for _ in plans]
    with start_exchange(options, ranks) as worker:
        for repeat in range(options.repeats):
            for plan, seconds in zip(plans, found):
                seconds.append(measure_horovod(worker, plan))
            _logger.info("exchange, repeat %d of %d", repeat + 1, options.repeats)
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


def _print(record: dict[str, Any]) -> None:
    """Print the predictions here beside what was measured, those for the cluster, and warnings."""
    config, costs = record["config"], record["exchange_costs"]
    print(
        f"\n{config['name']}, {record['precision']}, {record['threads_per_rank']} thread(s) per"
        f" rank. Exchange here: {1e3 * costs.fixed:.2f} ms per step,"
        f" {1e3 * costs.per_message:.2f} ms per message,"
        f" {1e9 * costs.per_byte_sent:.2f} ms per MB sent"
    )
    header = ["here", "ranks", "compute ms", "exchange ms", "step ms", "measured ms", "error"]
    header += ["speed-up", "measured"]
    rows = [
        [
            kind,
            *_cells(row),
            f"{row['measured_step_ms']:.2f}",
            f"{100 * row['error']:.0f}%",
            f"{row['speedup']:.2f}",
            f"{row['measured_speedup']:.2f}",
        ]
        for kind, predictions in record["here"].items()
        for row in predictions
    ]
    print(markdown_table(header, rows))
    link = record["link"]
    print(
        f"\nPredicted, one rank per host, {1e6 * link.latency:g} us and"
        f" {8e-9 / link.seconds_per_byte:g} Gbit/s, {record['algorithm']} allreduce"
    )
    header = ["cluster", "ranks", "compute ms", "exchange ms", "step ms", "speed-up", "efficiency"]
    rows = [
        [kind, *_cells(row), f"{row['speedup']:.2f}", f"{row['efficiency']:.3f}"]
        for kind, predictions in record["cluster"].items()
        for row in predictions
    ]
    print(markdown_table(header, rows))
    for warning in record["warnings"]:
        print(f"warning: {warning}")


def _cells(row: dict[str, float]) -> list[str]:
    times = (f"{row[name]:.2f}" for name in ("compute_ms", "exchange_ms", "step_ms"))
    return [str(row["ranks"]), *times]


def _plot(out: str, stem: str, record: dict[str, Any]) -> None:
    """Plot the speed-ups, predicted and measured, over the numbers of ranks.

    Args:
      out: Directory of the files.
      stem: Their name without suffix.
      record: As `_print` gets it.
    """
    title = f"{record['config']['name']}, {record['precision']}: predicted speed-up"
    measured_ranks = [row["ranks"] for row in record["here"]["strong"]]
    with plot(out, stem, title, num_axes=2) as (here, cluster):
        series = {"ideal": measured_ranks}
        for kind, rows in record["here"].items():
            series[f"{kind}, predicted"] = [row["speedup"] for row in rows]
            series[f"{kind}, measured"] = [row["measured_speedup"] for row in rows]
        lines(here, measured_ranks, series, "ranks on this host", "speed-up over one rank")
        for kind, rows in record["cluster"].items():
            ranks = [row["ranks"] for row in rows]
            values = {f"{kind}, predicted": [row["speedup"] for row in rows]}
            lines(cluster, ranks, values, "ranks of the cluster", "speed-up over one rank")
        powers = [row["ranks"] for row in record["cluster"]["weak"]]
        lines(cluster, powers, {"ideal": powers}, "ranks of the cluster", "speed-up over one rank")
