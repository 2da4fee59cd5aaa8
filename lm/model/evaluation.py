"""Perplexity of a split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.data.batches import EvalBatches, Rows
from lm.model.windows import Model
from lm.perplexity import NllSum

_UNITS_PER_NAT = 2.0**40


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
    own = (0, 0)
    if rows.count:
        batches = EvalBatches(ids, config.eval_batch_size, config.num_steps, eos_id, rows)
        own = run_evaluation(session, model, batches, at_work)
    units, tokens = map(sum, zip(*gather(own)))
    return NllSum(units / _UNITS_PER_NAT, tokens)


def run_evaluation(
    session: tf.Session,
    model: Model,
    batches: EvalBatches,
    at_work: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """Run a model over a split's windows, starting with an empty recurrent state.

    Args:
      session: Session of the model's graph.
      model: A model built without dropout.
      batches: The windows, of as many rows as the model has.
      at_work: Called after each window.

    Returns:
      The summed nll of these rows, in units of 2^-40 nats, and the number of tokens. Integers,
      which add up to the same in any order: the sum does not depend on who runs which rows.
    """
    session.run(model.reset_state_op)
    units = tokens = 0
    for index in range(batches.num_windows):
        inputs, targets, mask = batches.window(index)
        feed = {model.inputs_ph: inputs, model.targets_ph: targets}
        nll_N, _ = session.run([model.nll_N, model.keep_state_op], feed)
        counted = nll_N[mask.ravel() == 1].astype(np.float64)
        # What is no number counts so much that no perplexity can be made of the whole.
        counted = np.nan_to_num(counted, nan=_UNITS_PER_NAT, posinf=_UNITS_PER_NAT)
        units += sum(map(int, np.rint(counted * _UNITS_PER_NAT)))
        tokens += len(counted)
        at_work()
    return units, tokens
