"""`advise`: what more ranks will bring, on this host and on a cluster, before the launch."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any

from lm.benchmark.exchange import measure_horovod, start_exchange
from lm.benchmark.messages import messages_of_step
from lm.benchmark.options import AdviceOptions
from lm.benchmark.plots import lines, plot
from lm.benchmark.prediction import HostCosts, Link, Predictor, fit_host_costs
from lm.benchmark.results import print_table
from lm.benchmark.statistics import summarize
from lm.benchmark.trainer import Trainer, in_turn
from lm.config import Config

STEM = "advise-{config[name]}-{precision}"
_TIME_COLUMNS = [
    ("ranks", "{ranks}"),
    ("compute ms", "{compute_ms:.2f}"),
    ("exchange ms", "{exchange_ms:.2f}"),
    ("step ms", "{step_ms:.2f}"),
]
_HERE_COLUMNS = [
    ("here", "{kind}"),
    *_TIME_COLUMNS,
    ("measured ms", "{measured_step_ms:.2f}"),
    ("error", "{error:.0%}"),
    ("speed-up", "{speedup:.2f}"),
    ("measured", "{measured_speedup:.2f}"),
]
_CLUSTER_COLUMNS = [
    ("cluster", "{kind}"),
    *_TIME_COLUMNS,
    ("speed-up", "{speedup:.2f}"),
    ("efficiency", "{efficiency:.3f}"),
]
_EMPTY = 4  # bytes; Horovod has no smaller message


def measure(config: Config, options: AdviceOptions) -> dict[str, Any]:
    """Measure, predict, and check the predictions."""
    batch_size = config.batch_size
    cluster_ranks = {
        "strong": _powers_of_two(min(options.max_ranks, batch_size)),
        "weak": _powers_of_two(options.max_ranks),
    }
    counts = {*options.rank_counts, *cluster_ranks["strong"]}
    shares = sorted({-(-batch_size // ranks) for ranks in counts} | {batch_size})
    vocab_size, compute, together = _measure_steps(config, options, shares)
    costs = _measure_exchange(config, options, vocab_size)
    link = Link(options.link_latency_us * 1e-6, 8e-9 / options.link_gbps)
    predictor = Predictor(config, vocab_size, compute, costs)
    here = {kind: [] for kind in cluster_ranks}
    for (ranks, kind), seconds in together.items():
        row = predictor.predict(ranks, kind, Link())
        row["measured_step_ms"] = 1000 * seconds
        ratio = row["step_ms"] / row["measured_step_ms"]
        row["measured_speedup"] = row["speedup"] * ratio
        row["error"] = ratio - 1
        here[kind].append(row)
    cluster = {
        kind: [predictor.predict(n, kind, link) for n in ranks]
        for kind, ranks in cluster_ranks.items()
    }
    return {
        "config": dataclasses.asdict(config),
        "precision": config.precision,
        "threads_per_rank": options.threads,
        "hosts": options.hosts,
        "link": link,
        "exchange_costs": costs,
        "here": here,
        "cluster": cluster,
        "warnings": _warnings(here, cluster),
    }


def _powers_of_two(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length())]


def _measure_steps(
    config: Config, options: AdviceOptions, shares: list[int]
) -> tuple[int, dict[int, float], dict[tuple[int, str], float]]:
    """Measure one rank with all shares of the batch, and beside it the ranks to check.

    Returns:
      The vocabulary's size; rows -> seconds of a step alone; (ranks, kind) -> seconds of a step.
    """
    batch_size = config.batch_size
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(Trainer(config, options, shares))
        measurements = {rows: partial(alone.measure, rows) for rows in shares}
        for ranks in options.rank_counts:
            weak = ranks * batch_size
            group = alone
            if ranks > 1:
                group = stack.enter_context(Trainer(config, options, [batch_size, weak], ranks))
            measurements[ranks, "strong"] = partial(group.measure, batch_size)
            measurements[ranks, "weak"] = partial(group.measure, weak)
        found = in_turn(options.repeats, measurements, "steps")
        vocab_size = alone.ask("vocab_size")[0]
    medians = {
        name: summarize([each["seconds"] for each in runs]).median for name, runs in found.items()
    }
    compute = {rows: medians.pop(rows) for rows in shares}
    return vocab_size, compute, medians


def _measure_exchange(config: Config, options: AdviceOptions, vocab_size: int) -> HostCosts:
    ranks = min(n for n in options.rank_counts if n > 1)
    messages = messages_of_step(config, vocab_size)
    # An allreduce of half the bytes sends as many as an allgather.
    sizes = [each.bytes // (2 if each.collective == "allgather" else 1) for each in messages]
    plans = {"one": [_EMPTY], "many": [_EMPTY] * len(sizes), "step": sizes}
    with start_exchange(options, ranks) as worker:
        measurements = {
            name: partial(measure_horovod, worker, plan) for name, plan in plans.items()
        }
        found = in_turn(options.repeats, measurements, "exchange")
    medians = {name: summarize(seconds).median for name, seconds in found.items()}
    bytes_sent = sum(message.bytes_sent(ranks) for message in messages)
    return fit_host_costs(**medians, num_messages=len(messages), bytes_sent=bytes_sent)


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


def show(record: dict[str, Any]) -> None:
    """Print the predictions here beside what was measured, those for the cluster, and warnings."""
    config, costs = record["config"], record["exchange_costs"]
    print(
        f"\n{config['name']}, {record['precision']}, {record['threads_per_rank']} thread(s) per"
        f" rank. Exchange here: {1e3 * costs.fixed:.2f} ms per step,"
        f" {1e3 * costs.per_message:.2f} ms per message,"
        f" {1e9 * costs.per_byte_sent:.2f} ms per MB sent"
    )
    print_table(_HERE_COLUMNS, _rows(record["here"]))
    link = record["link"]
    print(
        f"\nPredicted, one rank per host, {1e6 * link.latency:g} us and"
        f" {8e-9 / link.seconds_per_byte:g} Gbit/s"
    )
    print_table(_CLUSTER_COLUMNS, _rows(record["cluster"]))
    for warning in record["warnings"]:
        print(f"warning: {warning}")


def _rows(predictions: dict[str, list[dict]]) -> list[dict]:
    return [{"kind": kind, **row} for kind, rows in predictions.items() for row in rows]


def draw(stem: str, record: dict[str, Any]) -> None:
    """Plot the speed-ups, predicted and measured, into `stem.png` and `stem.pdf`."""
    title = f"{record['config']['name']}, {record['precision']}: predicted speed-up"
    labels = {"here": "ranks on this host", "cluster": "ranks of the cluster"}
    with plot(stem, title, num_axes=2) as panels:
        for axes, (place, label) in zip(panels, labels.items()):
            for kind, rows in record[place].items():
                ranks = [row["ranks"] for row in rows]
                series = {f"{kind}, predicted": [row["speedup"] for row in rows]}
                if place == "here":
                    series[f"{kind}, measured"] = [row["measured_speedup"] for row in rows]
                lines(axes, ranks, series, label)
            # Weak scaling, which comes last, goes on to more ranks than strong.
            lines(axes, ranks, {"ideal": ranks}, label)
