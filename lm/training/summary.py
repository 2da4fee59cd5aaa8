"""The summary and the start event of a run."""

import dataclasses
import os
import platform
import socket
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from lm import kernels, logger
from lm.distributed.agreement import by_rank
from lm.distributed.cores import core_ranges
from lm.errors import first_names
from lm.events.reporter import Reporter
from lm.system import package_version
from lm.training.exactness import Exactness
from lm.training.prepare import Job

_FEW_TOKENS = 128  # a micro-batch with fewer tokens needs most of its time to read large weights


def report_start(job: Job, exactness: Exactness, step: int, reporter: Reporter) -> None:
    """Write the start event, and log the summary. `step` is the step to resume from, or 0.

    All ranks call this together, in the training graph.
    """
    facts = _facts(job, exactness, step)
    reporter.event("start", **facts)
    for line in _summary(job, facts):
        logger.info(line)


def _facts(job: Job, exactness: Exactness, step: int) -> dict[str, Any]:
    """Return the fields of the start event. A field with one value per rank is a list."""
    config, comm = job.config, job.comm
    own = dict(
        hosts=socket.gethostname(),
        devices=job.device.name,
        cores=core_ranges(),
        local_rows=job.batches.rows.count,
        intra_op_threads=job.device.intra_op,
        inter_op_threads=job.device.inter_op,
        compiled_ops=kernels.description(),
        visible_gpus=len(tf.config.list_physical_devices("GPU")),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    ranks = comm.gather(own)
    weights = [v for v in tf.get_collection(tf.GraphKeys.MODEL_VARIABLES) if v.trainable]
    init_from = job.record.init_from and dataclasses.asdict(job.record.init_from)
    return dict(
        name=config.name,
        world_size=comm.size,
        **{name: [rank[name] for rank in ranks] for name in own},
        arithmetic=exactness.arithmetic,
        exact=exactness.text,
        backend=comm.backend,
        exchange_settings=comm.settings,
        provenance=job.record.provenance,
        parameters=_size(weights),
        trained_parameters=_size(tf.trainable_variables()),
        tokenizer=job.corpus.tokenizer.name,
        vocab_size=len(job.corpus.tokenizer),
        steps_per_epoch=job.batches.steps_per_epoch,
        output_dir=job.output_dir,
        resumed_from_step=step,
        init_from=init_from,
    )


def _size(variables: Sequence[tf.Variable]) -> int:
    return sum(variable.shape.num_elements() for variable in variables)


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
    frozen = facts["parameters"] - facts["trained_parameters"]
    frozen = f" ({frozen:,} of them frozen)" if frozen else ""
    differ = len(set(facts["arithmetic"])) > 1
    consequence = "results depend on which rank has which" if differ else "bitwise equal results"
    compiled_ops = _one_or_by_rank(facts["compiled_ops"], consequence)
    lines = {
        "ranks": f"{by_rank(devices)} (this is rank {rank})",
        "GPUs": f"{facts['visible_gpus'][rank]} visible here, CUDA_VISIBLE_DEVICES {visible}",
        "cores": by_rank(facts["cores"]),
        "threads": threads,
        "arithmetic": f"{_precision(job)}, {compiled_ops}",
        "exact": facts["exact"],
        "versions": f"Python {platform.python_version()}, TensorFlow {tf.__version__}, Horovod"
        f" {package_version('horovod') or 'not installed'}",
        "batch": f"{job.config.batch_size} rows, {local_rows} per rank"
        f"{describe_micro_batches(job)}",
        "model": f"{facts['parameters']:,} parameters{frozen}, vocabulary {facts['vocab_size']:,}",
        "epoch": f"{facts['steps_per_epoch']:,} steps",
        "test": "none, because the corpus has no test split" if job.corpus.test is None else "",
        "output_dir": facts["output_dir"],
    }
    if file := job.record.config_file:
        files = {file.path: file.sha256, **file.loaded}
        shown = [f"{path} (SHA-256 {sha256[:12]}...)" for path, sha256 in files.items()]
        lines["config file"] = first_names(shown)  # the run record contains all of them
    if size > 1:
        lines["transport"] = job.comm.transport
        settings = facts["exchange_settings"].items()
        lines["exchange"] = " ".join(f"{name}={value}" for name, value in settings)
    found = [f"  {name:11} {text}" for name, text in lines.items() if text]
    if facts["resumed_from_step"]:
        found.append(f"  resumed after step {facts['resumed_from_step']:,}")
    return [f"training {facts['name']} {how}", *found]


def describe_micro_batches(job: Job) -> str:
    """Return the size of the micro-batches if a user-defined network computes them separately."""
    if job.functions.is_built_in or job.device.gpu is not None:
        return ""
    rows, *others = job.batches.rows.micro_batches
    count, threads, advice = len(others) + 1, job.device.inter_op, ""
    if count < threads:
        advice = (
            f"; only {count} of {threads} threads have a micro-batch: raise --virtual_ranks (all"
            f" ranks have {threads * job.comm.size} threads), and use a multiple of it as"
            " --batch_size"
        )
    elif count > threads and rows * job.config.num_steps < _FEW_TOKENS:
        advice = "; fewer --virtual_ranks are faster if the model is large"
    return f", {rows} per micro-batch{advice}"


def _precision(job: Job) -> str:
    precision = job.config.precision
    if precision == "float32":
        return precision
    if kernels.available() and not kernels.multiplies_bfloat16():
        precision += " (not faster than float32: the CPU or the compiler lacks bfloat16)"
    return precision


def _one_or_by_rank(values: Sequence[str], consequence: str) -> str:
    return values[0] if len(set(values)) == 1 else f"{by_rank(values)}: {consequence}"
