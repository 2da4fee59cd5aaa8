"""`exchange`: latency and bandwidth of an allreduce, by Horovod and by MPI alone."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from lm.benchmark import results
from lm.benchmark.messages import Message
from lm.benchmark.options import ExchangeOptions, Options
from lm.benchmark.plots import plot
from lm.benchmark.statistics import fit_line, summarize
from lm.benchmark.workers.process import Worker, run_to_end
from lm.cli.tables import markdown_table
from lm.config import Config
from lm.distributed import mpirun

_MAX_COUNT, _MIN_COUNT = 100, 5
_BYTES_PER_REPEAT = 100e6  # how often a size is exchanged: as many bytes of each

_logger = logging.getLogger("lm")


def message_sizes(max_mb: float) -> list[int]:
    """Return 4 bytes, then 1 KiB, 4 KiB, 16 KiB, ... up to a size."""
    sizes = [4, 1024]
    while sizes[-1] * 4 <= max_mb * 2**20:
        sizes.append(sizes[-1] * 4)
    return sizes


def start_exchange(options: Options, ranks: int) -> Worker:
    """Start ranks that exchange buffers."""
    places = dict(ranks=ranks, threads=options.threads, hosts=options.hosts)
    return Worker("ExchangeServer", {}, **places)


def measure_horovod(worker: Worker, sizes: Sequence[int]) -> float:
    """Return the seconds that some allreduces, started together, take on the slowest rank.

    Args:
      worker: An ExchangeServer.
      sizes: Bytes of each.
    """
    return max(worker.ask("allreduce", sizes=list(sizes), **_counts(sum(sizes))))


def _counts(num_bytes: int) -> dict[str, int]:
    count = min(max(int(_BYTES_PER_REPEAT / num_bytes), _MIN_COUNT), _MAX_COUNT)
    return {"count": count, "untimed": 2}


def _measure_mpi(options: ExchangeOptions, sizes: Sequence[int]) -> list[float]:
    Worker.pause_all()
    plan = json.dumps([[size, *_counts(size).values()] for size in sizes])
    program = [sys.executable, "-m", "lm.benchmark.workers.raw_mpi", plan]
    launcher = mpirun.command(options.ranks, options.hosts)
    return json.loads(run_to_end([*launcher, *program], options.threads))


def run(_: Config, options: ExchangeOptions) -> None:
    """Measure, print, and write the results."""
    sizes = message_sizes(options.max_mb)
    facts = results.environment_facts()
    horovod: dict[int, list[float]] = {size: [] for size in sizes}
    mpi: dict[int, list[float]] = {size: [] for size in sizes}
    _logger.info("starting %d ranks", options.ranks)
    with start_exchange(options, options.ranks) as worker:
        for repeat in range(options.repeats):
            for size in sizes:
                horovod[size].append(measure_horovod(worker, [size]))
            for size, seconds in zip(sizes, _measure_mpi(options, sizes)):
                mpi[size].append(seconds)
            _logger.info("repeat %d of %d", repeat + 1, options.repeats)
    record = {
        **facts,
        "benchmark": "exchange",
        "ranks": options.ranks,
        "hosts": options.hosts,
        "repeats": options.repeats,
        "horovod": _records(horovod, options.ranks),
        "mpi": _records(mpi, options.ranks),
    }
    _print(record)
    stem = f"exchange-{options.ranks}"
    results.write_json(options.out, stem, record)
    _plot(options.out, stem, record)


def _records(seconds: dict[int, list[float]], ranks: int) -> dict[str, Any]:
    medians = [(size, summarize(times).median) for size, times in seconds.items()]
    line = fit_line(medians)
    return {
        "latency_us": 1e6 * medians[0][1],
        "fit_us": 1e6 * line.intercept,
        "fit_us_per_mb": 1e12 * line.slope,
        "sizes": [
            {
                "bytes": size,
                "us": summarize([1e6 * each for each in times]),
                # What each rank sends per second in a ring: comparable over numbers of ranks.
                "bus_gb_per_second": Message("allreduce", size).bytes_sent(ranks)
                / summarize(times).median
                / 1e9,
            }
            for size, times in seconds.items()
        ],
    }


def _print(record: dict[str, Any]) -> None:
    print(f"\nallreduce over {record['ranks']} ranks, medians of {record['repeats']} repeats")
    header = ["bytes", "Horovod us", "std", "GB/s", "MPI us", "std", "GB/s"]
    rows = []
    for pair in zip(record["horovod"]["sizes"], record["mpi"]["sizes"]):
        cells = [str(pair[0]["bytes"])]
        for each in pair:
            cells += [f"{each['us'].median:.1f}", f"{each['us'].std:.1f}"]
            cells += [f"{each['bus_gb_per_second']:.3f}"]
        rows.append(cells)
    print(markdown_table(header, rows))


def _plot(out: str, stem: str, record: dict[str, Any]) -> None:
    with plot(out, stem, f"Allreduce over {record['ranks']} ranks", num_axes=2) as axes:
        for name in ("horovod", "mpi"):
            sizes = [each["bytes"] for each in record[name]["sizes"]]
            times = [each["us"].median for each in record[name]["sizes"]]
            speeds = [each["bus_gb_per_second"] for each in record[name]["sizes"]]
            for each, values in zip(axes, (times, speeds)):
                each.loglog(sizes, values, "o-", markersize=4, label=name)
        for each, label in zip(axes, ("microseconds", "GB/s sent by a rank")):
            each.set_xlabel("bytes")
            each.set_ylabel(label)
