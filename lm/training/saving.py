"""The checkpoints of a running job: what all ranks do together to save."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Optional

import tensorflow.compat.v1 as tf

from lm.checkpoint import variables
from lm.checkpoint.manifest import Manifest
from lm.checkpoint.writer import Saver
from lm.distributed.communicator import Communicator
from lm.distributed.waiting import WaitingRoom
from lm.errors import EveryRankError
from lm.training.job import Job
from lm.training.progress import Position

logger = logging.getLogger("lm")

_POLL_SECONDS = 0.2


class Safekeeping:
    """Saves a run; every method but `is_due` is to be called by all ranks at the same point.

    Args:
      job: What is trained.
      comm: The ranks.
      session: The training session.
      beat: Told the phase that begins, for the watchdog.
    """

    def __init__(
        self, job: Job, comm: Communicator, session: tf.Session, beat: Callable[[str], None]
    ):
        self._job, self._comm, self._session, self._beat = job, comm, session, beat
        with session.graph.as_default():
            self._weight_names = variables.weight_names()
        self._saver: Optional[Saver] = None
        if job.run_dir:
            options = job.options
            self._saver = Saver(
                job.run_dir.path,
                options.keep_checkpoints,
                options.checkpoint_every_steps,
                options.checkpoint_every_minutes,
            )

    def is_due(self, step: int) -> bool:
        """Tell whether rank 0 wants to save at this step; to be asked once at each."""
        return self._saver is not None and self._saver.is_due(step)

    def save(self, position: Position, in_sync: bool = True) -> None:
        """Copy what a checkpoint holds, and let rank 0 write it in the background.

        Args:
          position: Where the run is.
          in_sync: Whether the ranks hold the same weights, as far as is known.

        Raises:
          EveryRankError: A number of it is NaN or infinite, so that nothing can go on from it.
        """
        self._wait_for_saver()
        phase = f"the save at step {position.step}"
        self._beat(phase)
        state = variables.read_state(self._session, self._comm.concat)
        arrays = {**variables.read_variables(self._session), **state} if self._saver else {}
        wild = self._comm.gather(variables.first_not_finite(arrays))[0]
        if wild:
            raise EveryRankError(
                f"{wild} is not finite after step {position.step}, which is not saved: go on from"
                " an older checkpoint with --resume, or with a lower learning_rate"
            )
        if self._saver:
            self._saver.start(arrays, self._manifest(position, in_sync))

    def finish(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
          EveryRankError: It could not be written.
        """
        failure = self._wait_for_saver()
        if failure:
            raise EveryRankError(failure)

    def wait(self) -> None:
        """Wait until this rank writes nothing; no exchange, so for the way out of a failed run."""
        if self._saver:
            self._saver.wait()

    def _wait_for_saver(self) -> Optional[str]:
        """Return why the last save failed, or None."""
        # Not to be interrupted: a signal to stop must not leave the save that it asks for.
        room = WaitingRoom(
            self._comm.gather,
            beat=lambda: self._beat("the writing of a checkpoint"),
            stop_requested=lambda: 0,
        )
        if self._saver and self._saver.is_busy:
            logger.info("waiting until the last checkpoint is written")
        while self._saver and self._saver.is_busy:
            self._saver.wait(_POLL_SECONDS)
            room.at_work()
        failure = self._saver.failure if self._saver else None
        return room.gather(str(failure) if failure else None)[0]

    def _manifest(self, position: Position, in_sync: bool) -> Manifest:
        job, perplexity = self._job, position.valid_perplexity
        steps_per_epoch = job.batches.steps_per_epoch
        return Manifest(
            step=position.step,
            epoch=math.ceil(position.step / steps_per_epoch),
            steps_per_epoch=steps_per_epoch,
            world_size=self._comm.size,
            seed=job.config.seed,
            config=dataclasses.asdict(job.config),
            vocabulary=job.corpus.vocabulary.checksum,
            corpus=job.corpus.checksum,
            position=dataclasses.asdict(position),
            weights=self._weight_names,
            valid_perplexity=perplexity,
            in_sync=in_sync,
        )
