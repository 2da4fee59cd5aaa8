"""The summary and the start event of a run, including whether its results are exact."""

import os
import platform
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm import kernels, logger
from lm.distributed.agreement import by_rank, on_all_ranks
from lm.distributed.horovod import horovod_version
from lm.events.logs import LogFiles
from lm.events.reporter import Reporter
from lm.model.network import Network
from lm.record import LOG_FILE, VOCABULARY_FILE
from lm.system import cpu_model
from lm.training.prepare import Job
from lm.training.progress import TrainProgress
from lm.training.step import NUM_SUMS

_ONE_DNN = ("TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA")


def report_start(job: Job, network: Network, progress: TrainProgress, reporter: Reporter) -> None:
    """Open the log files and write the start event, the summary, the record and the vocabulary.

    All ranks call this together, in the training graph.
    """
    comm = job.comm
    output_dir = comm.gather(reporter.output_dir)[0]
    paths = [os.path.join(output_dir, LOG_FILE)]
    if job.options.log_path:
        paths.append(job.options.log_path)
    with on_all_ranks(comm):
        reporter.logs = LogFiles(paths, job.options.mpi_log, comm.rank)
        if comm.is_rank_0:
            _write_files(job)
    facts = _facts(job, network, progress, output_dir)
    reporter.event("start", **facts)
    for line in _summary(job, facts):
        logger.info(line)


def _write_files(job: Job) -> None:
    path, checkpoint = job.run_dir.path, job.run_dir.checkpoint
    job.record.write(path, has_checkpoints=checkpoint is not None)
    job.corpus.vocabulary.save(os.path.join(path, VOCABULARY_FILE))


def _facts(job: Job, network: Network, progress: TrainProgress, output_dir: str) -> dict[str, Any]:
    """Return the fields of the start event. A field with one value per rank is a list."""
    config, comm = job.config, job.comm
    own = dict(
        hosts=socket.gethostname(),
        devices=job.device.name,
        local_rows=job.batches.rows.count,
        intra_op_threads=job.device.intra_op,
        inter_op_threads=job.device.inter_op,
        compiled_ops=kernels.description(),
        arithmetic=_arithmetic(job),
        visible_gpus=len(tf.config.list_physical_devices("GPU")),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    ranks = comm.gather(own)
    by_name = {name: [rank[name] for rank in ranks] for name in own}
    return dict(
        name=config.name,
        world_size=comm.size,
        **by_name,
        exact=_find_exactness(job, network, progress, by_name["arithmetic"]),
        backend=comm.backend,
        exchange_settings=comm.settings,
        python=platform.python_version(),
        tensorflow=tf.__version__,
        horovod=horovod_version(),
        numpy=np.__version__,
        parameters=sum(v.shape.num_elements() for v in tf.trainable_variables()),
        vocab_size=len(job.corpus.vocabulary),
        steps_per_epoch=job.batches.steps_per_epoch,
        output_dir=output_dir,
        resumed_from_step=progress.step,
    )


def _summary(job: Job, facts: dict[str, Any]) -> list[str]:
    size, rank = job.comm.size, job.comm.rank
    how = f"distributed over {size} ranks with {facts['backend']}" if size > 1 else "on one process"
    visible = facts["cuda_visible_devices"][rank]
    visible = "not set" if visible is None else repr(visible)
    devices = [f"{host} {d.split(':')[0]}" for host, d in zip(facts["hosts"], facts["devices"])]
    threads = [
        f"{intra_op} inside an operation, {inter_op} operation{'s' * (inter_op != 1)} at a time"
        for intra_op, inter_op in zip(facts["intra_op_threads"], facts["inter_op_threads"])
    ]
    local_rows = " or ".join(map(str, sorted(set(facts["local_rows"]))))
    threads = _one_or_by_rank(threads, "the fastest ranks wait for the slowest")
    differ = len(set(facts["arithmetic"])) > 1
    consequence = "results depend on which rank has which" if differ else "bitwise equal results"
    compiled_ops = _one_or_by_rank(facts["compiled_ops"], consequence)
    lines = {
        "ranks": f"{by_rank(devices)} (this is rank {rank})",
        "GPUs": f"{facts['visible_gpus'][rank]} visible here, CUDA_VISIBLE_DEVICES {visible}",
        "threads": threads,
        "arithmetic": f"{_precision(job)}, {compiled_ops}",
        "exact": facts["exact"],
        "versions": f"Python {facts['python']}, TensorFlow {facts['tensorflow']}, Horovod"
        f" {facts['horovod'] or 'not installed'}",
        "batch": f"{job.config.batch_size} rows, {local_rows} per rank",
        "model": f"{facts['parameters']:,} parameters, vocabulary {facts['vocab_size']:,}",
        "epoch": f"{facts['steps_per_epoch']:,} steps",
        "output_dir": facts["output_dir"],
    }
    if file := job.record.config_file:
        files = {file.path: file.sha256, **file.loaded}
        lines["config file"] = ", ".join(f"{f} (SHA-256 {s[:12]}...)" for f, s in files.items())
    if size > 1:
        settings = facts["exchange_settings"].items()
        lines["exchange"] = " ".join(f"{name}={value}" for name, value in settings)
    found = [f"  {name:11} {text}" for name, text in lines.items()]
    if facts["resumed_from_step"]:
        found.append(f"  resumed after step {facts['resumed_from_step']:,}")
    return [f"training {facts['name']} {how}", *found]


def _precision(job: Job) -> str:
    functions, precision = job.functions, job.config.precision
    if precision == "float32":
        return precision
    if not functions.is_built_in:
        layer = "in the output layer and " if "build_outputs" in functions.by_name else ""
        precision += f" {layer}where the network uses context.ops"
    if kernels.available() and not kernels.multiplies_bfloat16():
        precision += " (not faster than float32: this CPU lacks bfloat16 instructions)"
    return precision


def _one_or_by_rank(values: Sequence[str], consequence: str) -> str:
    return values[0] if len(set(values)) == 1 else f"{by_rank(values)}: {consequence}"


def _arithmetic(job: Job) -> str:
    """Describe what can change the last bits of the results, in addition to the record."""
    if job.functions.is_built_in:
        return kernels.arithmetic(job.config.precision)
    one_dnn = {name: os.environ[name] for name in _ONE_DNN if name in os.environ}
    return (
        f"{kernels.arithmetic(job.config.precision)}, TensorFlow {tf.__version__},"
        f" {cpu_model()}, oneDNN {one_dnn or 'default'}"
    )


def _find_exactness(
    job: Job, network: Network, progress: TrainProgress, arithmetic: Sequence[str]
) -> str:
    """Return whether results are identical on all supported numbers of ranks, or why not.

    Each start decides for the steps that it computes. `progress` records whether the earlier steps
    were exact.
    """
    if job.config.scale_lr_by_worker != "none":
        progress.exact_with = None
        return "no: the learning rate depends on the number of ranks"
    why = _why_inexact(job, network, arithmetic)
    if not why and progress.step and progress.exact_with != arithmetic[0]:
        before = progress.exact_with
        how = f"were computed with {before}" if before else "are not exact"
        why = f"the steps up to {progress.step:,} {how}"
        logger.warning("%s", why)
    elif why and progress.step and progress.exact_with:
        cause = why if kernels.available() else kernels.description()  # with the fix
        step = f"{progress.step:,}"
        logger.warning("the run was exact up to step %s and will no longer be: %s", step, cause)
    progress.exact_with = None if why else arithmetic[0]
    if why:
        return f"no: {why}; results on different numbers of ranks are equal up to rounding"
    return f"yes: bitwise identical on any power of two up to {job.config.virtual_ranks} ranks"


def _why_inexact(job: Job, network: Network, arithmetic: Sequence[str]) -> str:
    config, comm = job.config, job.comm
    if not kernels.available():  # on any rank: the ranks have agreed on this
        return "sums of plain TensorFlow depend on threads and ranks"
    if len(set(arithmetic)) > 1:
        return "the ranks' arithmetic differs"
    if network.audit.why_irreproducible:
        return network.audit.why_irreproducible
    if config.virtual_ranks % comm.size:
        return f"{comm.size} ranks do not divide virtual_ranks {config.virtual_ranks}"
    variables = tf.get_collection(tf.GraphKeys.MODEL_VARIABLES)
    sizes = {variable.shape.num_elements() for variable in variables}
    return comm.why_inexact([*sizes, NUM_SUMS])
