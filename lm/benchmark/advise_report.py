"""What `advise` tells: tables, warnings and a plot."""

from __future__ import annotations

from typing import Any

from lm.benchmark.plots import lines, plot
from lm.cli.tables import markdown_table


def print_advice(record: dict[str, Any]) -> None:
    """Print the predictions here beside what was measured, those for the cluster, and warnings."""
    config, costs = record["config"], record["exchange_costs"]
    print(
        f"\n{config['name']}, {record['precision']}, {record['threads_per_rank']} thread(s) a rank."
        f" Exchange here: {1e3 * costs.fixed:.2f} ms a step, {1e3 * costs.per_message:.2f} ms a"
        f" message, {1e9 * costs.per_byte_sent:.2f} ms a MB sent"
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
        f"\nPredicted, one rank a host, {1e6 * link.latency:g} us and"
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


def plot_advice(out: str, stem: str, record: dict[str, Any]) -> None:
    """Plot the speed-ups, predicted and measured, over the numbers of ranks.

    Args:
      out: Directory of the files.
      stem: Their name without suffix.
      record: As `print_advice` gets it.
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
