"""Validation and test of a running job: on rank 0 while the others wait, or on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Optional

import tensorflow.compat.v1 as tf

from lm.data.corpus import Corpus
from lm.distributed.communicator import Communicator
from lm.distributed.waiting import WaitingRoom
from lm.model.network import Network
from lm.model.windows import Evaluator
from lm.perplexity import NllSum
from lm.training.averaging import Average


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
        self._corpus, self._comm, self._shared = corpus, comm, shared
        self._average, self._beat, self._stop_requested = average, beat, stop_requested
        eos_id = corpus.vocabulary.eos_id
        self._evaluator = Evaluator(network, eos_id, comm.rank, comm.size, shared)

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
        phase = f"the evaluation of {split}" + ("" if self._shared else " on rank 0")
        room = WaitingRoom(
            self._comm.gather,
            beat=lambda: self._beat(phase, stoppable=True),
            stop_requested=self._stop_requested,
        )
        with self._average.in_place(session) if averaged else contextlib.nullcontext():
            return self._evaluator.run(session, split, ids, room.gather, room.at_work)
