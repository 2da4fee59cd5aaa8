"""One measurement in a new process: `run` starts this module as a program.

No other process of the benchmark exists during a measurement, so none can take cores or memory.
A task is passed on the command line, and rank 0 prints the result as a line of JSON.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lm.benchmark.options import Options
from lm.benchmark.workload import Step, StepResult, load_words
from lm.cli import program
from lm.config import Config
from lm.config_file import load_config_file
from lm.data.batches import TrainBatches, rows_of_rank
from lm.distributed import launch
from lm.distributed.communicator import Communicator
from lm.errors import ERROR, RunError
from lm.system import (
    ends_with_this_process,
    import_tensorflow,
    peak_memory_mb,
    seconds_since_start,
)

_RESULT = "benchmark result: "  # starts the line of the result: libraries print to stdout too
_TIMEOUT_SECONDS = 1800
_COMPARED_STEPS = 4  # the losses of these steps are reported, and they are not timed
_REPEAT_SECONDS = 2.0
_MIN_STEPS = 3


def run(
    config: Config,
    options: Options,
    implementation: str = "ours",
    ranks: int = 1,
    message_bytes: Sequence[int] = (),
) -> dict[str, Any]:
    """Run one measurement in a new process, or in several ranks under mpirun.

    Args:
      config: The model and its global batch.
      options: Threads, hosts and data.
      implementation: "ours", "gemm", "exchange", or a variant in `step.PEERS`.
      ranks: Number of ranks, which must be 1 for a peer.
      message_bytes: Sizes of the messages of "exchange".

    Returns:
      The result of `_measure_steps`, `ours.measure_gemm` or `ours.measure_exchange`.

    Raises:
      RunError: If the process fails or does not end.
    """
    task = {
        "implementation": implementation,
        "config_file": options.config,
        "config": dataclasses.asdict(config),
        "threads": options.threads,
        "data_path": options.data_path,
        "message_bytes": message_bytes,
    }
    launcher = launch.mpirun_command(ranks, options.hosts) if ranks > 1 else []
    worker = [sys.executable, "-m", "lm.benchmark.worker", json.dumps(task)]
    name = f"{implementation} on {ranks} rank{'s' * (ranks > 1)}"
    try:
        done = subprocess.run(
            [*launcher, *worker],
            env=_environment(str(options.threads)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            preexec_fn=ends_with_this_process(signal.SIGTERM),
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{name} did not finish in {_TIMEOUT_SECONDS} s") from None
    results = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not results:
        raise RunError(f"{name} failed: {_error_line(done.stderr)}")
    return json.loads(results[0].removeprefix(_RESULT))


def _environment(threads: str) -> dict[str, str]:
    return launch.mpirun_environment(
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        # Horovod runs sessions before the worker chooses its threads.
        TF_NUM_INTRAOP_THREADS=threads,
        TF_NUM_INTEROP_THREADS="1",
        TF_CPP_MIN_LOG_LEVEL="3",
    )


def _error_line(stderr: str) -> str:
    """Return the error message of a failed process: mpirun prints a banner after it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip(" -")]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["it printed nothing"])[-1].removeprefix(ERROR)


def _work(task: dict[str, Any], comm: Communicator) -> None:
    file = load_config_file(task["config_file"])
    config = type(file.config)(**task["config"])
    implementation, threads = task["implementation"], task["threads"]
    ours = None
    if implementation in ("ours", "gemm", "exchange"):
        import_tensorflow()
        from lm.benchmark import ours
    if implementation == "gemm":
        result = ours.measure_gemm(config.precision, threads, comm)
    elif implementation == "exchange":
        result = ours.measure_exchange(task["message_bytes"], threads, comm)
    else:
        ids, vocab_size = load_words(config, task["data_path"])
        if ours:
            step, facts = ours.build_step(config, file.functions, vocab_size, threads, comm)
        else:
            peer = importlib.import_module(f"lm.benchmark.peer_{implementation.split('-')[0]}")
            step, facts = peer.build_step(config, vocab_size, implementation, threads), {}
        result = {"vocab_size": vocab_size, **facts, **_measure_steps(config, step, ids, comm)}
    if comm.is_rank_0:
        print(f"{_RESULT}{json.dumps(result)}", flush=True)


def _measure_steps(
    config: Config, step: Step, ids: np.ndarray, comm: Communicator
) -> dict[str, Any]:
    """Time a training step.

    Returns:
      The mean `seconds`, `input_seconds` and `exchange_seconds` of a step; the `losses` and
      `grad_norms` of the first steps; `first_step_seconds` since the start of the process; and the
      memory `peak_mb`.
    """
    rows = rows_of_rank(config.batch_size, comm.rank, comm.size)
    batches = TrainBatches(ids, config.batch_size, config.num_steps, rows)

    def take_step(index: int) -> tuple[StepResult, float, float]:
        start = time.perf_counter()
        window = batches.window(index % batches.steps_per_epoch)
        input_seconds = time.perf_counter() - start
        return step(*window), time.perf_counter() - start, input_seconds

    untimed = [take_step(0)]
    first_step_seconds = seconds_since_start()
    untimed += [take_step(index) for index in range(1, _COMPARED_STEPS)]
    fastest = min(seconds for _, seconds, _ in untimed)
    # All ranks must take the same number of steps.
    count = comm.gather(max(_MIN_STEPS, round(_REPEAT_SECONDS / fastest)))[0]
    timed = [take_step(_COMPARED_STEPS + index) for index in range(count)]
    results, seconds, input_seconds = zip(*timed)
    # A rank that is ahead waits for the others: only the shortest time is the exchange itself.
    exchanges = comm.gather([result.exchange_seconds for result in results])
    return {
        "seconds": max(comm.gather(statistics.fmean(seconds))),
        "input_seconds": max(comm.gather(statistics.fmean(input_seconds))),
        "exchange_seconds": float(np.min(exchanges, axis=0).mean()),
        "first_step_seconds": first_step_seconds,
        "losses": [result.loss for result, *_ in untimed],
        "grad_norms": [result.grad_norm for result, *_ in untimed],
        "peak_mb": max(comm.gather(peak_memory_mb())),
    }


if __name__ == "__main__":
    program.run(lambda argv: json.loads(argv[1]), _work)
