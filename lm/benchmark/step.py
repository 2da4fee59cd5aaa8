"""`step`: how fast one process trains, beside the GEMM peak and beside others' programs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import statistics
import time
from typing import Any, Optional

from lm.benchmark import results
from lm.benchmark.options import StepOptions
from lm.benchmark.plots import bars, plot
from lm.benchmark.statistics import paired_ratio, summarize
from lm.benchmark.trainer import Trainer
from lm.cli.tables import markdown_table
from lm.config import Config
from lm.errors import RunError
from lm.model.shape import step_flops

_GEMM_PRODUCTS = 5
_COMPARED_STEPS = 4  # without dropout, the first losses of all contestants should be the same

_logger = logging.getLogger("lm")


class Contestant:
    """A program that trains the model, and what was measured of it so far.

    Args:
      name: "ours", "ours-float32", "tensorflow", or one of PyTorch's.
      config: The model.
      options: How it is measured.

    Raises:
      RunError: It cannot run here.
    """

    def __init__(self, name: str, config: Config, options: StepOptions):
        if name == "ours-float32":
            config = dataclasses.replace(config, precision="float32")
        self._batch_size = config.batch_size
        self.seconds: list[float] = []  # of a step, by repeat
        start = time.perf_counter()
        trainer = Trainer(
            config, options, [config.batch_size], contestant=name.removesuffix("-float32")
        )
        self._trainer, self.worker = trainer, trainer.worker
        try:
            first = self.worker.ask("train", count=1)[0]
            self.first_step_seconds = time.perf_counter() - start
            after = self.worker.ask("train", count=_COMPARED_STEPS - 1)[0]
            self.losses = first["losses"] + after["losses"]
            self.grad_norms = first["grad_norms"] + after["grad_norms"]
        except RunError:
            self.worker.close()
            raise

    def measure(self) -> None:
        """Add one repeat."""
        found = self._trainer.measure(self._batch_size)
        if not self.seconds:
            # The first only: the matrices of the GEMM peak are not part of a program's memory.
            self.peak_rss = found["peak_rss"]
        self.seconds.append(found["seconds"])


def run(config: Config, options: StepOptions) -> None:
    """Measure, print, and write the results.

    Raises:
      RunError: This project's own step fails.
    """
    facts = results.environment_facts()
    gemm = []
    with contextlib.ExitStack() as stack:
        contestants = _start(config, options, stack)
        for repeat in range(options.repeats):
            for contestant in contestants.values():
                contestant.measure()
                if contestant is contestants["ours"]:
                    request = dict(size=options.gemm_size, count=_GEMM_PRODUCTS)
                    gemm.append(contestant.worker.ask("gemm", **request)[0])
            _logger.info("repeat %d of %d", repeat + 1, options.repeats)
        record = {**facts, **_record(config, options, contestants, gemm)}
    _print(record)
    stem = f"step-{record['config']['name']}-{record['precision']}"
    results.write_json(options.out, stem, record)
    _plot(options.out, stem, record)


def _start(
    config: Config, options: StepOptions, stack: contextlib.ExitStack
) -> dict[str, Contestant]:
    contestants = {}
    for name in _names(options.peers, config.precision):
        _logger.info("starting %s", name)
        try:
            contestant = Contestant(name, config, options)
        except RunError as error:
            if name == "ours":
                raise
            _logger.warning("left out: %s", error)
            continue
        stack.callback(contestant.worker.close)
        contestants[name] = contestant
    return contestants


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
        _logger.warning("PyTorch is not installed and left out: pip install -e '.[bench]'")
        torch = []
    return ours + torch


def _record(
    config: Config, options: StepOptions, contestants: dict[str, Contestant], gemm: list
) -> dict[str, Any]:
    ours = contestants["ours"]
    words = config.batch_size * config.num_steps
    vocab_size = ours.worker.ask("vocab_size")[0]
    flops = step_flops(config, vocab_size)
    table = {}
    for name, contestant in contestants.items():
        seconds = contestant.seconds
        table[name] = {
            "words_per_second": summarize([words / each for each in seconds]),
            "ms_per_step": summarize([1000 * each for each in seconds]),
            "gflops": summarize([flops / each / 1e9 for each in seconds]),
            "time_over_ours": paired_ratio(seconds, ours.seconds),
            "peak_rss_bytes": contestant.peak_rss,
            "first_step_seconds": contestant.first_step_seconds,
            "first_losses": contestant.losses,
            "first_grad_norms": contestant.grad_norms,
            "seconds_per_step": seconds,
        }
    return {
        "benchmark": "step",
        "config": dataclasses.asdict(config),
        "precision": config.precision,
        "threads": options.threads,
        "vocab_size": vocab_size,
        "repeats": options.repeats,
        "mflops_per_word": flops / words / 1e6,
        "gemm_gflops": summarize([each / 1e9 for each in gemm]),
        "share_of_gemm_peak": summarize(
            [flops / seconds / peak for seconds, peak in zip(ours.seconds, gemm)]
        ),
        "best_torch": _best_torch(contestants),
        "contestants": table,
    }


def _best_torch(contestants: dict[str, Contestant]) -> Optional[str]:
    medians = {
        name: statistics.median(contestant.seconds)
        for name, contestant in contestants.items()
        if name.startswith("torch")
    }
    return min(medians, key=medians.get) if medians else None


def _print(record: dict[str, Any]) -> None:
    config = record["config"]
    title = (
        f"{config['name']}, {record['precision']}, {record['threads']} thread(s), batch"
        f" {config['batch_size']} x {config['num_steps']}, {record['repeats']} repeats,"
        f" {record['mflops_per_word']:.1f} MFLOP per word"
    )
    header = ["", "words/s", "std", "median", "ms/step", "GFLOP/s"]
    header += ["time/ours [95 %]", "peak MB", "first step s", "first loss"]
    rows = []
    for name, found in record["contestants"].items():
        words, ratio = found["words_per_second"], found["time_over_ours"]
        rows.append(
            [
                name + ("  *" if name == record["best_torch"] else ""),
                *(f"{value:.0f}" for value in words),
                f"{found['ms_per_step'].median:.1f}",
                f"{found['gflops'].median:.1f}",
                str(ratio) if name != "ours" else "1",
                f"{found['peak_rss_bytes'] / 1e6:.0f}",
                f"{found['first_step_seconds']:.1f}",
                f"{found['first_losses'][0]:.4f}",
            ]
        )
    print(f"\n{title}\n{markdown_table(header, rows)}")
    if record["best_torch"]:
        print("* the fastest PyTorch")
    peak, share = record["gemm_gflops"], record["share_of_gemm_peak"]
    print(
        f"GEMM peak {peak.median:.1f} GFLOP/s (std {peak.std:.1f}), ours reaches"
        f" {100 * share.median:.1f} % of it (std {100 * share.std:.1f})"
    )


def _plot(out: str, stem: str, record: dict[str, Any]) -> None:
    title = f"Training step, {record['config']['name']}, {record['precision']}"
    with plot(out, stem, f"{title}, {record['threads']} thread(s)") as (axes,):
        speeds = {name: found["words_per_second"] for name, found in record["contestants"].items()}
        bars(axes, speeds, "words/s (mean and standard deviation)")
