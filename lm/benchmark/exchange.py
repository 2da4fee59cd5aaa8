"""`exchange`: latency and bandwidth of an allreduce, by Horovod and by MPI alone."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from lm.benchmark import options, results
from lm.benchmark.messages import Message
from lm.benchmark.plots import plot
from lm.benchmark.statistics import fit_line, summarize
from lm.benchmark.workers import Worker, mpirun_command, run_to_end
from lm.cli.flags import Flags
from lm.cli.tables import markdown_table
from lm.errors import UserError

_MAX_COUNT, _MIN_COUNT = 100, 5
_BYTES_PER_REPEAT = 100e6  # how often a size is exchanged: as many bytes of each

_logger = logging.getLogger("lm")


class ExchangeBenchmark(NamedTuple):
    """What is measured."""

    ranks: int
    hosts: Optional[str]
    threads: int
    sizes: list[int]  # bytes
    repeats: int
    out: str


def parse(argv: Sequence[str]) -> ExchangeBenchmark:
    """Turn the command line into a benchmark."""
    flags = Flags(
        "Measure an allreduce of float32 over sizes: Horovod as training configures it, and MPI.\n"
        "\n"
        "  python -m lm.benchmark exchange --ranks 2 --max_mb 64"
    )
    flags.define(int, "ranks", 2, "number of ranks (default: 2)")
    flags.define(str, "hosts", None, "as mpirun's -H: host1:1,host2:1 (default: this host)")
    flags.define(float, "max_mb", 64.0, "largest message, in 2^20 bytes (default: 64)")
    options.define_common(flags, repeats=5)
    flags.parse(argv)
    options.positive(flags, "repeats", "intra_op_threads")
    if flags["ranks"] < 2:
        raise UserError(f"ranks must be at least 2, not {flags['ranks']}")
    if not 0.001 <= flags["max_mb"] <= 4096:
        raise UserError(f"max_mb must be from 0.001 to 4096, not {flags['max_mb']}")
    results.make_directory(flags["out"])
    return ExchangeBenchmark(
        ranks=flags["ranks"],
        hosts=flags["hosts"],
        threads=options.choose_threads(
            flags, options.ranks_per_host(flags["ranks"], flags["hosts"])
        ),
        sizes=message_sizes(flags["max_mb"]),
        repeats=flags["repeats"],
        out=flags["out"],
    )


def message_sizes(max_mb: float) -> list[int]:
    """Return 4 bytes, then 1 KiB, 4 KiB, 16 KiB, ... up to a size."""
    sizes = [4, 1024]
    while sizes[-1] * 4 <= max_mb * 2**20:
        sizes.append(sizes[-1] * 4)
    return sizes


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


def _measure_mpi(benchmark: ExchangeBenchmark) -> list[float]:
    Worker.pause_all()
    plan = json.dumps([[size, *_counts(size).values()] for size in benchmark.sizes])
    command = [*mpirun_command(benchmark.ranks, benchmark.hosts), sys.executable]
    return json.loads(run_to_end([*command, "-m", "lm.benchmark.raw_mpi", plan], benchmark.threads))


def run(benchmark: ExchangeBenchmark) -> None:
    """Measure, print, and write the results."""
    facts = results.environment_facts()
    horovod: dict[int, list[float]] = {size: [] for size in benchmark.sizes}
    mpi: dict[int, list[float]] = {size: [] for size in benchmark.sizes}
    _logger.info("starting %d ranks", benchmark.ranks)
    with Worker(
        "ExchangeServer",
        {},
        ranks=benchmark.ranks,
        threads=benchmark.threads,
        hosts=benchmark.hosts,
    ) as worker:
        for repeat in range(benchmark.repeats):
            for size in benchmark.sizes:
                horovod[size].append(measure_horovod(worker, [size]))
            for size, seconds in zip(benchmark.sizes, _measure_mpi(benchmark)):
                mpi[size].append(seconds)
            _logger.info("repeat %d of %d", repeat + 1, benchmark.repeats)
    record = {
        **facts,
        "benchmark": "exchange",
        "ranks": benchmark.ranks,
        "hosts": benchmark.hosts,
        "repeats": benchmark.repeats,
        "horovod": _records(horovod, benchmark.ranks),
        "mpi": _records(mpi, benchmark.ranks),
    }
    _print(record)
    stem = f"exchange-{benchmark.ranks}"
    results.write_json(benchmark.out, stem, record)
    _plot(benchmark.out, stem, record)


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
                # What each rank sends in a ring, a second: comparable over numbers of ranks.
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
