"""Perplexity of a text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm.data.batches import EvalBatches, Rows, eval_rows_of_rank
from lm.model.network import Network
from lm.model.windows import Model, build_model
from lm.perplexity import NllSum

logger = logging.getLogger("lm")

_UNITS_PER_NAT = 2.0**40


class Evaluator:
    """A network's model for evaluation, and this rank's rows of it.

    Args:
      network: Of the graph that is being built; its config has `eval_batch_size` and `num_steps`.
      eos_id: Id of `<eos>`.
      rank: This rank.
      size: Number of ranks.
      shared: Whether the ranks share the rows, instead of rank 0 alone.
    """

    def __init__(self, network: Network, eos_id: int, rank: int, size: int, shared: bool):
        self._config, self._eos_id = network.config, eos_id
        self._rows = eval_rows_of_rank(self._config.eval_batch_size, rank, size, shared)
        # A rank without rows builds what it never runs: networks may not take one row.
        built = self._rows if self._rows.count else Rows(0, self._config.eval_batch_size)
        self._model = build_model(network, built, "eval")

    def run(
        self,
        session: tf.Session,
        name: str,
        ids: np.ndarray,
        gather: Callable[[Any], list],
        at_work: Callable[[], None] = lambda: None,
    ) -> NllSum:
        """Evaluate a text on all ranks together; each row starts with an empty recurrent state.

        Args:
          session: Of the model's graph.
          name: Of the text, for the log.
          ids: The text, int32 [tokens].
          gather: Returns the values of all ranks, by rank; ranks without rows wait in it.
          at_work: Called after each window.

        Returns:
          Its summed nll and number of tokens, each counted once; the same on all ranks.
        """
        logger.info("evaluating %s: %s tokens", name, f"{len(ids):,}")
        own, config = (0, 0), self._config
        if self._rows.count:
            sizes = config.eval_batch_size, config.num_steps
            batches = EvalBatches(ids, *sizes, self._eos_id, self._rows)
            own = run_evaluation(session, self._model, batches, at_work)
        units, tokens = map(sum, zip(*gather(own)))
        return NllSum(units / _UNITS_PER_NAT, tokens)


def run_evaluation(
    session: tf.Session, model: Model, batches: EvalBatches, at_work: Callable[[], None]
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
        counted = nll_N[mask.ravel()].astype(np.float64)
        # What is no number counts so much that no perplexity can be made of the whole.
        counted = np.nan_to_num(counted, nan=_UNITS_PER_NAT, posinf=_UNITS_PER_NAT)
        units += sum(map(int, np.rint(counted * _UNITS_PER_NAT)))
        tokens += len(counted)
        at_work()
    return units, tokens
