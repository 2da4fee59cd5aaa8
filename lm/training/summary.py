"""What a run tells about itself when it starts."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import resource
import socket
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm import kernels, run_files
from lm.distributed.agreement import by_rank, raise_on_all_ranks
from lm.distributed.horovod import horovod_version
from lm.events.reporter import Reporter
from lm.system import seconds_since_start
from lm.training.prepare import Prepared
from lm.training.progress import TrainProgress
from lm.training.step import NUM_SUMS

logger = logging.getLogger("lm")


def report_start(run: Prepared, position: TrainProgress, reporter: Reporter, exact: str) -> None:
    """Open the log files, and write the start event, the summary and the files that describe
    the run; all ranks must call it together, in the graph of the training."""
    comm = run.comm
    output_dir = comm.gather(reporter.output_dir)[0]
    paths = [os.path.join(output_dir, run_files.LOG)]
    if run.options.log_path:
        paths.append(run.options.log_path)
    raise_on_all_ranks(comm, lambda: reporter.open_logs(paths, run.options.mpi_log, comm.rank))
    if comm.is_rank_0:
        run.record.write(output_dir, has_checkpoints=run.run_dir.checkpoint is not None)
        run.corpus.vocabulary.save(os.path.join(output_dir, run_files.VOCABULARY))
    facts = _facts(run, position, output_dir) | {"exact": exact}
    reporter.event("start", **facts)
    for line in _summary(run, facts):
        logger.info(line)


def _facts(run: Prepared, position: TrainProgress, output_dir: str) -> dict[str, Any]:
    """Return what the start event tells; the same on all ranks, but for what is this rank's."""
    config, comm = run.config, run.comm
    own = dict(
        hosts=socket.gethostname(),
        devices=run.device.name,
        local_rows=run.batches.rows.count,
        intra_op_threads=run.device.intra_op,
        inter_op_threads=run.device.inter_op,
        compiled_ops=kernels.description(),
        visible_gpus=len(tf.config.list_physical_devices("GPU")),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        start_seconds=seconds_since_start(),
        memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    ranks = comm.gather(own)
    gathered = {name: [rank[name] for rank in ranks] for name in own}
    most = {name: max(gathered[name]) for name in ("start_seconds", "memory_mb")}
    return dict(
        name=config.name,
        world_size=comm.size,
        **(gathered | most),
        backend=comm.backend,
        exchange_settings=comm.settings,
        python=platform.python_version(),
        tensorflow=tf.__version__,
        horovod=horovod_version(),
        numpy=np.__version__,
        precision=config.precision,
        batch_size=config.batch_size,
        config_file=dataclasses.asdict(run.record)["config_file"],
        parameters=sum(v.shape.num_elements() for v in tf.trainable_variables()),
        corpus=run.corpus.record.kind,
        vocab_size=len(run.corpus.vocabulary),
        steps_per_epoch=run.batches.steps_per_epoch,
        words_per_epoch=run.batches.steps_per_epoch * config.batch_size * config.num_steps,
        output_dir=output_dir,
        resumed_from_step=position.step,
    )


def _summary(run: Prepared, facts: dict[str, Any]) -> list[str]:
    size, rank = run.comm.size, run.comm.rank
    how = f"distributed over {size} ranks with {facts['backend']}" if size > 1 else "on one process"
    gpus = facts["visible_gpus"][rank]
    visible = facts["cuda_visible_devices"][rank]
    places = [f"{host} {d.split(':')[0]}" for host, d in zip(facts["hosts"], facts["devices"])]
    threads = [
        f"{intra_op} inside an operation, {inter_op} operation{'s' * (inter_op != 1)} at a time"
        for intra_op, inter_op in zip(facts["intra_op_threads"], facts["inter_op_threads"])
    ]
    lines = [
        f"training {facts['name']} {how}",
        f"  ranks       {by_rank(places)} (this is rank {rank})",
        f"  GPUs        {gpus} visible here, CUDA_VISIBLE_DEVICES "
        + ("not set" if visible is None else repr(visible)),
        f"  threads     {_same_or_by_rank(threads, 'the fastest wait for the slowest')}",
        f"  arithmetic  {_precision(run)}, "
        + _same_or_by_rank(
            facts["compiled_ops"],
            "results depend on which rank has which, and the fastest wait for the slowest",
        ),
        f"  exact       {facts['exact']}",
        f"  versions    Python {facts['python']}, TensorFlow {facts['tensorflow']}, Horovod"
        f" {facts['horovod'] or 'not installed'}",
        f"  batch       {facts['batch_size']} rows,"
        f" {' or '.join(map(str, sorted(set(facts['local_rows']))))} per rank",
        f"  model       {facts['parameters']:,} parameters, vocabulary {facts['vocab_size']:,}",
        f"  epoch       {facts['steps_per_epoch']:,} steps, {facts['words_per_epoch']:,} words",
        f"  output_dir  {facts['output_dir']}",
        f"  start       {facts['start_seconds']:.1f} s on the slowest rank; up to"
        f" {facts['memory_mb']:.0f} MB per rank",
    ]
    if record := run.record.config_file:
        lines.append(f"  config file {record.path}, SHA-256 {record.sha256[:12]}...")
    if size > 1:
        lines.append(
            "  exchange    "
            + " ".join(f"{name}={value}" for name, value in facts["exchange_settings"].items())
        )
    if facts["resumed_from_step"]:
        lines.append(f"  resumed after step {facts['resumed_from_step']:,}")
    return lines


def _precision(run: Prepared) -> str:
    functions, precision = run.functions, run.config.precision
    if precision == "float32":
        return precision
    if not functions.is_built_in:
        layer = "" if functions.kind == "logits" else "in the output layer and "
        precision += f" {layer}where context.ops is used"
    if kernels.available() and not kernels.multiplies_bfloat16():
        precision += " (no faster than float32, for want of instructions)"
    return precision


def _same_or_by_rank(values: list[str], consequence: str) -> str:
    return values[0] if len(set(values)) == 1 else f"{by_rank(values)}: {consequence}"


def find_exactness(run: Prepared, position: TrainProgress) -> str:
    """Tell whether a run is the one of any other number of ranks, or why not.

    Each start of a run decides for its steps; the position remembers whether those before were
    exact too. To be called on all ranks, in the graph of the training.

    Args:
      run: What is about to be trained.
      position: Where it starts; told what computes its steps.
    """
    compiled_ops = run.comm.gather(kernels.description())
    if run.config.scale_lr_by_worker != "none":
        position.exact_with = None
        return "no: the learning rate depends on the number of ranks"
    why = _why_inexact(run, compiled_ops)
    if not why and position.step and position.exact_with != compiled_ops[0]:
        before = position.exact_with
        how = f"were computed with {before}" if before else "are not exact"
        why = f"the steps up to {position.step:,} {how}"
    position.exact_with = None if why else compiled_ops[0]
    if why:
        rounding = "equal to runs on other numbers of ranks up to rounding"
        if not run.functions.is_built_in and not run.options.check_network:
            rounding += ", if no row depends on another one (--check_network)"
        return f"no: {why}; {rounding}"
    return f"yes: the same bits on any power of two up to {run.config.virtual_ranks} ranks"


def _why_inexact(run: Prepared, compiled_ops: list[str]) -> str:
    config, comm, functions = run.config, run.comm, run.functions
    if not functions.is_built_in:
        return f"{functions.where} computes with TensorFlow's own operations"
    if not kernels.available():  # here, or on any rank: they have agreed on that
        return "sums of plain TensorFlow depend on threads and ranks"
    if len(set(compiled_ops)) > 1:
        return "the ranks' compiled ops differ"
    if config.virtual_ranks % comm.size:
        return f"{comm.size} ranks do not divide virtual_ranks {config.virtual_ranks}"
    sizes = [v.shape.num_elements() for v in tf.trainable_variables()]
    return comm.why_inexact([*sizes, NUM_SUMS])
