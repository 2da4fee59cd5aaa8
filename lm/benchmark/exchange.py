"""`exchange`: latency and bandwidth of an allreduce, by Horovod and by MPI alone."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lm.benchmark.messages import Message
from lm.benchmark.options import ExchangeOptions, Options
from lm.benchmark.plots import plot
from lm.benchmark.results import print_table
from lm.benchmark.statistics import fit_line, summarize
from lm.benchmark.trainer import in_turn
from lm.benchmark.workers.process import Worker, run_to_end
from lm.config import Config
from lm.distributed import mpirun

STEM = "exchange-{ranks}"
_MAX_COUNT, _MIN_COUNT = 100, 5
_BYTES_PER_REPEAT = 100e6  # how often a size is exchanged: as many bytes of each

_COLUMNS = [
    ("bytes", "{horovod[bytes]}"),
    ("Horovod us", "{horovod[us].median:.1f}"),
    ("std", "{horovod[us].std:.1f}"),
    ("GB/s", "{horovod[bus_gb_per_second]:.3f}"),
    ("MPI us", "{mpi[us].median:.1f}"),
    ("std", "{mpi[us].std:.1f}"),
    ("GB/s", "{mpi[bus_gb_per_second]:.3f}"),
]

logger = logging.getLogger("lm")


def message_sizes(max_mb: float) -> list[int]:
    """Return 4 bytes, then 1 KiB, 4 KiB, 16 KiB, ... up to a size."""
    sizes = [4, 1024]
    while sizes[-1] * 4 <= max_mb * 2**20:
        sizes.append(sizes[-1] * 4)
    return sizes


def start_exchange(options: Options, ranks: int) -> Worker:
    """Start ranks that exchange buffers."""
    hosts = options.hosts
    return Worker("ExchangeServer", {}, ranks=ranks, threads=options.threads, hosts=hosts)


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
    plan = json.dumps([[size, *_counts(size).values()] for size in sizes])
    program = [sys.executable, "-m", "lm.benchmark.workers.raw_mpi", plan]
    launcher = mpirun.command(options.ranks, options.hosts)
    return json.loads(run_to_end([*launcher, *program], options.threads))


def measure(_: Config, options: ExchangeOptions) -> dict[str, Any]:
    """Measure each size by Horovod, and then all of them by MPI."""
    sizes = message_sizes(options.max_mb)
    logger.info("starting %d ranks", options.ranks)
    with start_exchange(options, options.ranks) as worker:
        measurements = {size: partial(measure_horovod, worker, [size]) for size in sizes}
        measurements["mpi"] = partial(_measure_mpi, options, sizes)
        horovod = in_turn(options.repeats, measurements)
    mpi = dict(zip(sizes, zip(*horovod.pop("mpi"))))
    return {
        "ranks": options.ranks,
        "hosts": options.hosts,
        "repeats": options.repeats,
        "horovod": _records(horovod, options.ranks),
        "mpi": _records(mpi, options.ranks),
    }


def _records(seconds: Mapping[int, Sequence[float]], ranks: int) -> dict[str, Any]:
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


def show(record: dict[str, Any]) -> None:
    """Print one row per size."""
    print(f"\nallreduce over {record['ranks']} ranks, medians of {record['repeats']} repeats")
    rows = [
        {"horovod": horovod, "mpi": mpi}
        for horovod, mpi in zip(record["horovod"]["sizes"], record["mpi"]["sizes"])
    ]
    print_table(_COLUMNS, rows)


def draw(stem: str, record: dict[str, Any]) -> None:
    """Plot times and bandwidths over the sizes into `stem.png` and `stem.pdf`."""
    with plot(stem, f"Allreduce over {record['ranks']} ranks", num_axes=2) as (times, speeds):
        for name in ("horovod", "mpi"):
            found = record[name]["sizes"]
            sizes = [each["bytes"] for each in found]
            style = {"marker": "o", "markersize": 4, "label": name}
            times.loglog(sizes, [each["us"].median for each in found], **style)
            speeds.loglog(sizes, [each["bus_gb_per_second"] for each in found], **style)
        for axes, label in ((times, "microseconds"), (speeds, "GB/s sent by a rank")):
            axes.set_xlabel("bytes")
            axes.set_ylabel(label)
