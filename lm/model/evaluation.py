"""Perplexity of a split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.data.batches import EvalBatches, Rows
from lm.model.perplexity import NllSum
from lm.model.windows import Model


def evaluate(
    session: tf.Session,
    model: Model,
    ids: np.ndarray,
    config: Config,
    eos_id: int,
    rows: Rows,
    gather: Callable[[Any], list],
    at_work: Callable[[], None] = lambda: None,
) -> NllSum:
    """Evaluate a split on all ranks together; each row starts with an empty recurrent state.

    Args:
      session: Session of the model's graph.
      model: Built without dropout for the rows of this rank (any, where it has none).
      ids: The split, int32 [tokens].
      config: For `eval_batch_size` and `num_steps`.
      eos_id: Id of `<eos>`.
      rows: The rows of this rank, from `eval_rows_of_rank`.
      gather: Returns the values of all ranks, by rank; ranks without rows wait in it.
      at_work: Called after each window.

    Returns:
      The split's summed nll and number of tokens, each counted once; the same on all ranks.
    """
    own = NllSum()
    if rows.count:
        batches = EvalBatches(ids, config.eval_batch_size, config.num_steps, eos_id, rows)
        own = run_evaluation(session, model, batches, at_work)
    # In the order of the ranks, so that all of them get the same number to the last bit.
    return sum((NllSum(*values) for values in gather(dataclasses.astuple(own))), NllSum())


def run_evaluation(
    session: tf.Session,
    model: Model,
    batches: EvalBatches,
    at_work: Callable[[], None] = lambda: None,
) -> NllSum:
    """Run a model over a split's windows, starting with an empty recurrent state.

    Args:
      session: Session of the model's graph.
      model: A model built without dropout.
      batches: The windows, of as many rows as the model has.
      at_work: Called after each window.

    Returns:
      The summed nll and the number of tokens of these rows.
    """
    session.run(model.reset_state_op)
    total = NllSum()
    for index in range(batches.num_windows):
        inputs, targets, mask = batches.window(index)
        feed = {
            model.inputs_ph: inputs,
            model.targets_ph: targets,
            model.mask_ph: mask,
        }
        nll_N, _ = session.run([model.nll_N, model.keep_state_op], feed)
        # Token by token in float64: a float32 sum would depend on how the rows are shared out.
        counted = nll_N[mask.ravel() == 1].astype(np.float64)
        total += NllSum(float(counted.sum()), len(counted))
        at_work()
    return total
