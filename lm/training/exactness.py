"""Whether a run is the same, bit for bit, on any number of ranks."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from lm import kernels
from lm.training.position import Position
from lm.training.prepare import Prepared
from lm.training.step import NUM_SUMS


def find_exactness(run: Prepared, position: Position) -> str:
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
