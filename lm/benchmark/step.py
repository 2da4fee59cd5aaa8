"""`step`: how fast one process trains, beside the GEMM peak and beside others' programs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import math
import statistics
import time
from functools import partial
from typing import Any

from lm.benchmark.options import StepOptions
from lm.benchmark.plots import bars, plot
from lm.benchmark.results import print_table
from lm.benchmark.statistics import paired_ratio, summarize
from lm.benchmark.trainer import Trainer, in_turn
from lm.config import Config
from lm.errors import RunError

STEM = "step-{config[name]}-{precision}"
_GEMM_PRODUCTS = 5
_COMPARED_STEPS = 4  # without dropout, the first losses of all contestants should be the same

_COLUMNS = [
    ("", "{name}"),
    ("words/s", "{words_per_second.mean:.0f}"),
    ("std", "{words_per_second.std:.0f}"),
    ("median", "{words_per_second.median:.0f}"),
    ("ms/step", "{ms_per_step.median:.1f}"),
    ("GFLOP/s", "{gflops.median:.1f}"),
    ("time/ours [95 %]", "{ratio}"),
    ("peak MB", "{peak_mb:.0f}"),
    ("first step s", "{first_step_seconds:.1f}"),
    ("first loss", "{first_losses[0]:.4f}"),
]

logger = logging.getLogger("lm")


def measure(config: Config, options: StepOptions) -> dict[str, Any]:
    """Measure all contestants, and the peak beside ours.

    Raises:
      RunError: This project's own step fails.
    """
    with contextlib.ExitStack() as stack:
        trainers, starts = {}, {}
        for name in _names(options.peers, config.precision):
            try:
                trainers[name], starts[name] = _start(name, config, options, stack)
            except RunError as error:
                if name == "ours":
                    raise
                logger.warning("left out: %s", error)
        ours = trainers["ours"]
        gemm = partial(ours.ask, "gemm", size=options.gemm_size, count=_GEMM_PRODUCTS)
        measurements = {}
        for name, trainer in trainers.items():
            measurements[name] = partial(trainer.measure, config.batch_size)
            if trainer is ours:
                measurements["gemm"] = gemm
        found = in_turn(options.repeats, measurements)
        vocab_size, kernels = ours.ask("vocab_size")[0], ours.ask("kernels")[0]
        flops = ours.ask("step_flops")[0] or math.nan  # not known of a config file's network
    peaks = [by_rank[0] for by_rank in found.pop("gemm")]
    record = _record(config, options, vocab_size, flops, starts, found, peaks)
    return {"kernels": kernels, **record}


def _start(
    name: str, config: Config, options: StepOptions, stack: contextlib.ExitStack
) -> tuple[Trainer, dict[str, Any]]:
    """Start a contestant; return what its first steps have told, too."""
    logger.info("starting %s", name)
    start = time.perf_counter()
    contestant = name.removesuffix("-float32")
    if contestant != name:
        config = dataclasses.replace(config, precision="float32")
    trainer = stack.enter_context(
        Trainer(config, options, [config.batch_size], contestant=contestant)
    )
    steps = partial(trainer.ask, "steps", batch_size=config.batch_size, untimed=0)
    first = steps(count=1)[0]
    seconds = time.perf_counter() - start
    after = steps(count=_COMPARED_STEPS - 1)[0]
    return trainer, {
        "first_step_seconds": seconds,
        "first_losses": first["losses"] + after["losses"],
        "first_grad_norms": first["grad_norms"] + after["grad_norms"],
    }


def _names(peers: bool, precision: str) -> list[str]:
    if not peers:
        return ["ours"]
    if precision == "bfloat16":
        ours = ["ours", "ours-float32"]
        torch = ["torch-autocast", "torch-autocast-compile"]
        torch += ["torch-bfloat16", "torch-bfloat16-compile"]
    else:
        ours, torch = ["ours", "tensorflow"], ["torch", "torch-compile"]
    if importlib.util.find_spec("torch") is None:
        logger.warning("PyTorch is not installed and left out: pip install -e '.[bench]'")
        torch = []
    return ours + torch


def _record(
    config: Config,
    options: StepOptions,
    vocab_size: int,
    flops: float,
    starts: dict[str, dict],
    found: dict[str, list[dict]],
    peaks: list[float],
) -> dict[str, Any]:
    words = config.batch_size * config.num_steps
    seconds = {name: [each["seconds"] for each in runs] for name, runs in found.items()}
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "config": dataclasses.asdict(config),
        "precision": config.precision,
        "threads": options.threads,
        "vocab_size": vocab_size,
        "repeats": options.repeats,
        "mflops_per_word": flops / words / 1e6,
        "gemm_gflops": summarize([peak / 1e9 for peak in peaks]),
        "share_of_gemm_peak": summarize(
            [flops / each / peak for each, peak in zip(seconds["ours"], peaks)]
        ),
        "best_torch": min(
            (name for name in seconds if name.startswith("torch")), key=medians.get, default=None
        ),
        "contestants": {
            name: {
                "words_per_second": summarize([words / each for each in times]),
                "ms_per_step": summarize([1000 * each for each in times]),
                "gflops": summarize([flops / each / 1e9 for each in times]),
                "time_over_ours": paired_ratio(times, seconds["ours"]),
                # The first only: the matrices of the GEMM peak are not a program's memory.
                "peak_rss_bytes": found[name][0]["peak_rss"],
                **starts[name],
                "seconds_per_step": times,
            }
            for name, times in seconds.items()
        },
    }


def show(record: dict[str, Any]) -> None:
    """Print one row per contestant, then the peak."""
    config = record["config"]
    print(
        f"\n{config['name']}, {record['precision']}, {record['threads']} thread(s), batch"
        f" {config['batch_size']} x {config['num_steps']}, {record['repeats']} repeats; ours:"
        f" {record['kernels']}"
    )
    rows = [
        {
            **found,
            "name": name + ("  *" if name == record["best_torch"] else ""),
            "ratio": found["time_over_ours"] if name != "ours" else "1",
            "peak_mb": found["peak_rss_bytes"] / 1e6,
        }
        for name, found in record["contestants"].items()
    ]
    counted = not math.isnan(record["mflops_per_word"])
    print_table([each for each in _COLUMNS if counted or each[0] != "GFLOP/s"], rows)
    if record["best_torch"]:
        print("* the fastest PyTorch")
    peak, share = record["gemm_gflops"], record["share_of_gemm_peak"]
    print(f"GEMM peak {peak.median:.1f} GFLOP/s (std {peak.std:.1f})")
    if counted:
        print(
            f"{record['mflops_per_word']:.1f} MFLOP per word: ours reaches"
            f" {100 * share.median:.1f} % of the peak (std {100 * share.std:.1f})"
        )


def draw(stem: str, record: dict[str, Any]) -> None:
    """Plot the speeds into `stem.png` and `stem.pdf`."""
    title = f"Training step, {record['config']['name']}, {record['precision']}"
    with plot(stem, f"{title}, {record['threads']} thread(s)") as (axes,):
        speeds = {name: found["words_per_second"] for name, found in record["contestants"].items()}
        bars(axes, speeds, "words/s (mean and standard deviation)")
