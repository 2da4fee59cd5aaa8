"""Measurements in a new process: `run` starts the process, and `work` measures in it.

The benchmark runs no other process during a measurement, so its processes do not compete for cores
or memory. The tasks are passed on the command line. Rank 0 prints the results as a line of JSON.
"""

import dataclasses
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm.benchmark.workload import Step, StepResult, initial_weight, load_words
from lm.cli.parser import ConfigChoice
from lm.config import MAX_THREADS, Config
from lm.config_file import load_config_file
from lm.data.batches import TrainBatches, rows_of_rank
from lm.distributed.communicator import Communicator
from lm.distributed.cores import claim_cores
from lm.distributed.mpirun import mpirun_command, mpirun_environment
from lm.errors import ERROR, RunError, UserError, needs_extra
from lm.options import option
from lm.system import ends_with_this_process, peak_memory_mb
from lm.tensorflow_import import import_tensorflow

_RESULT = "benchmark result: "  # marks the line of the result: libraries print to stdout too
_TIMEOUT_SECONDS = 1800
_COMPARED_STEPS = 4  # the losses of these steps are reported, and these steps are not timed
_REPEAT_SECONDS = 2.0
_MIN_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Options(ConfigChoice):
    """The options that all commands share."""

    data_path: str | None = option(
        None,
        "directory of a corpus (default: random words, 10,000 unless --vocab_size is given)",
        is_path=True,
    )
    intra_op_threads: int | None = option(
        None, "threads of each rank (default: cores / ranks of a host)", low=1, high=MAX_THREADS
    )
    out: str = option("benchmarks", "directory of the JSON file with the results", is_path=True)

    @property
    def threads(self) -> int:
        """Threads of each rank."""
        return self.intra_op_threads or claim_cores()

    def check(self, config: Config) -> None:
        """Raise a UserError if options contradict each other or the config."""
        if self.data_path and not os.path.isdir(self.data_path):
            raise UserError(f"data_path {self.data_path} is not a directory")


@dataclasses.dataclass(frozen=True)
class Task:
    """One measurement."""

    config: Config
    implementation: str = "ours"  # see `_measure`, or a variant in `step_time.PEERS`
    ranks: int = 1  # peers need one rank
    shapes: Mapping[str, Sequence[int]] | None = None  # shapes of the weights, only for peers
    message_bytes: Sequence[int] = ()  # sizes of the messages of "exchange"


def run(tasks: Sequence[Task], options: Options, hosts: str | None = None) -> list[dict[str, Any]]:
    """Run measurements one after the other in a new process, or in several ranks under mpirun.

    The tasks need the same number of ranks. Return the result of `_measure_steps` or of a function
    `measure_...` in `ours` for each task.
    """
    common = {"config_file": options.config, "threads": options.threads}
    common["data_path"] = options.data_path
    facts = [{**dataclasses.asdict(task), **common} for task in tasks]
    ranks, timeout = tasks[0].ranks, _TIMEOUT_SECONDS * len(tasks)
    uses_mpirun = ranks > 1 or hosts  # one rank runs on the first host
    launcher = mpirun_command(ranks, hosts) if uses_mpirun else []
    name = f"{tasks[0].implementation} on {ranks} rank{'s' * (ranks > 1)}"
    environment = mpirun_environment(
        hosts, OMP_NUM_THREADS=str(options.threads), TF_CPP_MIN_LOG_LEVEL="3"
    )
    try:
        done = subprocess.run(
            [*launcher, sys.executable, "-m", "lm.benchmark", "worker", json.dumps(facts)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            preexec_fn=ends_with_this_process(signal.SIGTERM),
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{name} did not finish in {timeout} s") from None
    results = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not results:
        raise RunError(f"{name} failed: {_error_line(done.stderr)}")
    return json.loads(results[0].removeprefix(_RESULT))


def _error_line(stderr: str) -> str:
    # Search for the message, because mpirun prints a banner after the message.
    lines = [line.strip() for line in stderr.splitlines() if line.strip(" -")]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["no error message"])[-1].removeprefix(ERROR)


def work(tasks: Sequence[dict[str, Any]], comm: Communicator) -> None:
    """Run the tasks of this process, and print the results on rank 0."""
    results = [_measure(task, comm) for task in tasks]
    if comm.is_rank_0:
        print(f"{_RESULT}{json.dumps(results)}", flush=True)


def _measure(task: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    file = load_config_file(task["config_file"])
    config = type(file.config)(**task["config"])
    implementation, threads = task["implementation"], task["threads"]
    if task["shapes"]:
        return _measure_peer(config, task, comm)
    import_tensorflow()
    from lm.benchmark import ours

    if implementation == "gemm":
        return ours.measure_gemm(config.precision, threads, comm)
    if implementation == "exchange":
        return ours.measure_exchange(task["message_bytes"], threads, comm)
    ids, vocab_size = load_words(config, task["data_path"])
    if implementation == "products":
        return ours.measure_products(config, vocab_size, threads, comm)
    if implementation == "trace":
        return ours.measure_trace(config, file.functions, ids, vocab_size, threads, comm)
    step, facts = ours.build_step(config, file.functions, vocab_size, threads, comm)
    return {"vocab_size": vocab_size, **facts, **_measure_steps(config, step, ids, comm)}


def _measure_peer(config: Config, task: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    ids, _ = load_words(config, task["data_path"])
    variant, shapes = task["implementation"], task["shapes"].items()
    with needs_extra("bench"):
        peer = importlib.import_module(f"lm.benchmark.peer_{variant.split('-')[0]}")
    weights = {name: initial_weight(config, name, shape) for name, shape in shapes}
    step, device = peer.build_step(config, weights, variant, task["threads"])
    return {"device": device, **_measure_steps(config, step, ids, comm)}


def _measure_steps(
    config: Config, step: Step, ids: np.ndarray, comm: Communicator
) -> dict[str, Any]:
    """Return the mean seconds of a step and its exchange, the first losses, and the peak memory."""
    rows = rows_of_rank(config.batch_size, comm.rank, comm.size)
    batches = TrainBatches(ids, config.batch_size, config.num_steps, rows)

    def take_step(index: int) -> tuple[StepResult, float]:
        start = time.perf_counter()
        return step(*batches.window(index)), time.perf_counter() - start

    untimed = [take_step(index) for index in range(_COMPARED_STEPS)]
    fastest = min(seconds for _, seconds in untimed)
    # All ranks must take the same number of steps.
    count = comm.gather(max(_MIN_STEPS, round(_REPEAT_SECONDS / fastest)))[0]
    timed = [take_step(_COMPARED_STEPS + index) for index in range(count)]
    results, seconds = zip(*timed)
    # A fast rank waits for slow ranks: only the shortest time is the exchange itself.
    exchanges = comm.gather([result.exchange_seconds for result in results])
    return {
        "seconds": max(comm.gather(statistics.fmean(seconds))),
        "exchange_seconds": float(np.min(exchanges, axis=0).mean()),
        "losses": [result.loss for result, _ in untimed],
        "grad_norms": [result.grad_norm for result, _ in untimed],
        "peak_mb": max(comm.gather(peak_memory_mb())),
    }
