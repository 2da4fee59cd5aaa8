"""Validation and test of a running job: on rank 0 while the others wait, or on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow.compat.v1 as tf

from lm.data.batches import eval_rows_of_rank
from lm.distributed.communicator import Communicator
from lm.distributed.waiting import WaitingRoom
from lm.model.evaluation import evaluate
from lm.model.perplexity import NllSum
from lm.model.windows import Model
from lm.training.job import Job


class Validation:
    """Evaluates the splits of a job's corpus.

    Args:
      job: For its config and corpus.
      comm: The ranks.
      session: The training session.
      model: The model to evaluate, in the session's graph.
      beat: `Watchdog.beat`: told the phase that begins.
      stop_requested: Returns the number of the signal that asked this rank to stop, or 0.
    """

    def __init__(
        self,
        job: Job,
        comm: Communicator,
        session: tf.Session,
        model: Model,
        beat: Callable[..., None],
        stop_requested: Callable[[], int],
    ):
        self._job, self._comm, self._session, self._model = job, comm, session, model
        self._beat, self._stop_requested = beat, stop_requested

    def run(self, split: str) -> NllSum:
        """Evaluate "valid" or "test"; all ranks must call it, and get the same result.

        Raises:
          Interrupted: A rank has been asked to stop.
        """
        config, comm, corpus = self._job.config, self._comm, self._job.corpus
        ids = getattr(corpus, split)
        self._job.reporter.log(f"evaluating {split}: {len(ids):,} tokens")
        shared = self._job.options.distributed_eval
        phase = f"the evaluation of {split}" + ("" if shared else " on rank 0")
        room = WaitingRoom(
            comm.gather,
            beat=lambda: self._beat(phase, stoppable=True),
            stop_requested=self._stop_requested,
        )
        return evaluate(
            self._session,
            self._model,
            ids,
            config,
            corpus.vocabulary.eos_id,
            eval_rows_of_rank(config.eval_batch_size, comm.rank, comm.size, shared),
            room.gather,
            room.at_work,
        )
