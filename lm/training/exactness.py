"""Decide whether a run is exact, that is, bitwise identical on all supported numbers of ranks."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from lm import kernels, logger, system, tensorflow_import
from lm.checkpoint.progress import TrainProgress
from lm.model.network import Network
from lm.training.prepare import Job
from lm.training.step import NUM_SUMS

# Variables that change the results of TensorFlow's operations; other hosts get them too.
_ONE_DNN = (
    "TF_ENABLE_ONEDNN_OPTS", "TF_SET_ONEDNN_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE",
)  # fmt: skip


class Exactness(NamedTuple):
    """Whether a run is exact, including the steps before it was resumed."""

    arithmetic: Sequence[str]  # for each rank: everything except the record that can change bits
    exact_with: str | None  # the arithmetic of all steps, or None if the run is not exact
    text: str  # the answer and the reason, for the user


def find_exactness(job: Job, network: Network, progress: TrainProgress) -> Exactness:
    """Decide whether a run is exact. Warn if resuming changes whether it is exact.

    All ranks must call this function together, while the training graph is the default graph.
    """
    arithmetic = job.comm.gather(_arithmetic(job))
    if job.config.scale_lr_by_worker != "none":
        return Exactness(arithmetic, None, "no: the learning rate depends on the number of ranks")
    why, before = _why_inexact(job, network, arithmetic), progress.exact_with
    if not why and progress.step and before != arithmetic[0]:
        how = f"were computed with {before}" if before else "are not exact"
        why = f"the steps up to {progress.step:,} {how}"
        logger.warning("%s", why)
    elif why and progress.step and before:
        cause = why if kernels.available() else kernels.description()  # contains the fix
        step = f"{progress.step:,}"
        logger.warning("the run was exact up to step %s and will no longer be: %s", step, cause)
    if why:
        results = "results on different numbers of ranks are equal up to rounding"
        other_sizes = job.device.gpu is not None or job.config.virtual_ranks % job.comm.size
        if other_sizes and not job.functions.is_built_in:
            results += (
                ", or differ more if the network uses batch statistics, context.seed() or"
                " context.sample_candidates, because all rows of a rank are then one micro-batch"
            )
        if network.audit.why_irreproducible:
            results = "results of two runs may differ"
        text = f"no: {why}; {results}"
        return Exactness(arithmetic, None, text)
    text = f"yes: bitwise identical on any power of two up to {job.config.virtual_ranks} ranks"
    return Exactness(arithmetic, arithmetic[0], text)


def _arithmetic(job: Job) -> str:
    if job.functions.is_built_in:
        return kernels.arithmetic(job.config.precision)
    one_dnn = {name: os.environ[name] for name in _ONE_DNN if name in os.environ}
    return (
        f"{kernels.arithmetic(job.config.precision)}, TensorFlow {tf.__version__},"
        f" {system.cpu_identity()}, oneDNN {one_dnn or 'default'}"
    )


def _why_inexact(job: Job, network: Network, arithmetic: Sequence[str]) -> str:
    """Explain why the steps of this job are not exact, or return ""."""
    config, comm = job.config, job.comm
    if not kernels.available():  # The ranks have agreed on this.
        return "sums of plain TensorFlow depend on threads and ranks"
    if len(set(arithmetic)) > 1:
        return "the ranks' arithmetic differs"
    if network.audit.why_irreproducible:
        return network.audit.why_irreproducible
    if config.virtual_ranks % comm.size:
        return f"{comm.size} ranks do not divide virtual_ranks {config.virtual_ranks}"
    variables = tf.get_collection(tf.GraphKeys.MODEL_VARIABLES)
    sizes = {variable.shape.num_elements() for variable in variables}
    why = comm.why_inexact([*sizes, NUM_SUMS])
    if not why and tensorflow_import.is_late and not job.functions.is_built_in:
        return "TensorFlow was used before lm was imported (docs/python.md)"
    return why
