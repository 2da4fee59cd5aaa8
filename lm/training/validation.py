"""Validation and test of a running job: on rank 0 while the others wait, or on all ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Optional

import tensorflow.compat.v1 as tf

from lm.data.batches import Rows, eval_rows_of_rank
from lm.data.corpus import Corpus
from lm.distributed.communicator import Communicator
from lm.distributed.waiting import WaitingRoom
from lm.model.evaluation import evaluate
from lm.model.network import Network
from lm.model.windows import build_model
from lm.perplexity import NllSum
from lm.training.averaging import Average

logger = logging.getLogger("lm")


class Validation:
    """Evaluates the splits of a corpus with the weights of the training.

    Args:
      network: Of the graph that is being built; its config has `eval_batch_size`.
      corpus: Its splits are evaluated.
      comm: The ranks.
      average: Of the weights, where the config asks for one.
      shared: Whether they share the rows, instead of rank 0 alone.
      beat: `Watchdog.beat`: told the phase that begins.
      stop_requested: Returns the number of the signal that asked this rank to stop, or 0.
    """

    def __init__(
        self,
        network: Network,
        corpus: Corpus,
        comm: Communicator,
        average: Optional[Average],
        shared: bool,
        beat: Callable[..., None],
        stop_requested: Callable[[], int],
    ):
        config = network.config
        self._config, self._corpus, self._comm, self._shared = config, corpus, comm, shared
        self._average, self._beat, self._stop_requested = average, beat, stop_requested
        self._rows = eval_rows_of_rank(config.eval_batch_size, comm.rank, comm.size, shared)
        # A rank without rows builds what it never runs: networks may not take one row.
        rows = self._rows if self._rows.count else Rows(0, config.eval_batch_size)
        self._model = build_model(network, rows, "eval")

    def run(self, session: tf.Session, split: str, averaged: bool = False) -> NllSum:
        """Evaluate "valid" or "test"; all ranks must call it, and get the same result.

        Args:
          session: The training session.
          split: Which.
          averaged: Whether the average stands in for the weights.

        Raises:
          Interrupted: A rank has been asked to stop.
        """
        ids = getattr(self._corpus, split)
        logger.info("evaluating %s: %s tokens", split, f"{len(ids):,}")
        phase = f"the evaluation of {split}" + ("" if self._shared else " on rank 0")
        room = WaitingRoom(
            self._comm.gather,
            beat=lambda: self._beat(phase, stoppable=True),
            stop_requested=self._stop_requested,
        )
        with self._average.in_place(session) if averaged else contextlib.nullcontext():
            return evaluate(
                session,
                self._model,
                ids,
                self._config,
                self._corpus.vocabulary.eos_id,
                self._rows,
                room.gather,
                room.at_work,
            )
