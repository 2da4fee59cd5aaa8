"""Validation and test of a running job: on rank 0 while the others wait, or on all ranks."""

from __future__ import annotations

import contextlib
from typing import Optional

import tensorflow.compat.v1 as tf

from lm.data.corpus import Corpus
from lm.distributed.communicator import Communicator
from lm.distributed.supervisor import Supervisor
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
      supervisor: Keeps the ranks in touch.
    """

    def __init__(
        self,
        network: Network,
        corpus: Corpus,
        comm: Communicator,
        average: Optional[Average],
        shared: bool,
        supervisor: Supervisor,
    ):
        self._corpus, self._shared = corpus, shared
        self._average, self._supervisor = average, supervisor
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
        waiting = self._supervisor.waiting(phase)
        with self._average.in_place(session) if averaged else contextlib.nullcontext():
            return self._evaluator.run(session, split, ids, waiting.gather, waiting.poll)
