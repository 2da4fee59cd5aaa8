"""The checkpoints of a running job: what all ranks do together to save."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import NoReturn, Optional

import tensorflow.compat.v1 as tf

from lm.checkpoint import variables
from lm.checkpoint.manifest import Manifest
from lm.checkpoint.writer import Saver
from lm.distributed.agreement import weights_mismatch
from lm.distributed.communicator import Communicator
from lm.distributed.supervisor import Supervisor
from lm.errors import EveryRankError
from lm.training.position import Position

logger = logging.getLogger("lm")

_POLL_SECONDS = 0.2


class Safekeeping:
    """Saves a run; every method but `is_due` is to be called by all ranks at the same point.

    Args:
      saver: Writes the checkpoints; of rank 0, which alone has one.
      manifest: What is the same in all checkpoints of this run.
      comm: The ranks.
      session: The training session.
      supervisor: Keeps the ranks in touch.
    """

    def __init__(
        self,
        saver: Optional[Saver],
        manifest: Manifest,
        comm: Communicator,
        session: tf.Session,
        supervisor: Supervisor,
    ):
        self._saver, self._template = saver, manifest
        self._comm, self._session, self._supervisor = comm, session, supervisor

    def is_due(self, step: int) -> bool:
        """Tell whether rank 0 wants to save at this step; to be asked once at each."""
        return self._saver is not None and self._saver.is_due(step)

    def save(self, position: Position) -> None:
        """Copy what a checkpoint holds, and let rank 0 write it in the background.

        Raises:
          EveryRankError: The ranks' weights differ, or a number is NaN or infinite, so that nothing
            can go on from it.
        """
        self.check_in_sync(position)  # else those from before they parted would be pushed out
        self._save(position, in_sync=True)

    def _save(self, position: Position, in_sync: bool) -> None:
        self.wait()
        phase = f"the save at step {position.step}"
        self._supervisor.enter(phase)
        state = variables.read_state(self._session, self._comm.concat)
        arrays = {**variables.read_variables(self._session), **state} if self._saver else {}
        wild = self._comm.gather(variables.first_not_finite(self._session, arrays))[0]
        if wild:
            raise EveryRankError(
                f"{wild} is not finite after step {position.step}, which is not saved: start a new"
                " run with --init_from an older checkpoint, and a lower learning_rate"
            )
        if self._saver:
            self._saver.start(arrays, self._manifest(position, in_sync))

    def check_in_sync(self, position: Position) -> None:
        """Compare the ranks' weights, bit by bit.

        Raises:
          EveryRankError: They differ; what rank 0 has is saved, and marked.
        """
        if self._comm.size == 1:
            return
        self._supervisor.enter("the comparison of the weights")
        difference = weights_mismatch(self._comm, variables.read_variables(self._session))
        if difference:
            self._part(position, difference)

    def _part(self, position: Position, difference: str) -> NoReturn:
        try:
            # What goes on with them is not the run that any other number of ranks would have been.
            self._save(dataclasses.replace(position, exact_with=None), in_sync=False)
            self.finish()
            outcome = "rank 0's are saved, and --resume gives them to all ranks"
        except EveryRankError as error:
            outcome = str(error)
        raise EveryRankError(
            f"at step {position.step} the ranks disagree on the weights: checksum of {difference};"
            f" {outcome}; look for hosts with unlike processors, devices or libraries, a bug in"
            " what was changed last, or bad memory where one rank differs"
        )

    def finish(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
          EveryRankError: It could not be written.
        """
        failure = self.wait()
        if failure:
            raise EveryRankError(failure)

    def wait(self) -> Optional[str]:
        """Wait until the last save is over, and return why it failed, or None."""
        # All ranks stay in touch meanwhile: otherwise their supervisors would end them.
        phase = "the writing of a checkpoint"
        # While rank 0 writes, to be in touch is no progress: a disk that never answers must not
        # keep the job for ever. Not to be interrupted: a signal to stop must not leave the save
        # that it asks for.
        waiting = self._supervisor.waiting(phase, stoppable=False)
        if self._is_writing:
            logger.info("waiting until the last checkpoint is written")
        while self._is_writing:
            self._supervisor.enter(phase, alone=True, progress=False)
            self._saver.wait(_POLL_SECONDS)
            waiting.poll(progress=False)
        failure = self._saver.failure if self._saver else None
        return waiting.gather(str(failure) if failure else None)[0]

    @property
    def _is_writing(self) -> bool:
        return self._saver is not None and self._saver.is_busy

    def _manifest(self, position: Position, in_sync: bool) -> Manifest:
        return dataclasses.replace(
            self._template,
            step=position.step,
            epoch=math.ceil(position.step / self._template.steps_per_epoch),
            position=dataclasses.asdict(position),
            valid_perplexity=position.valid_perplexity,
            averaged=position.averaged > 0,
            in_sync=in_sync,
        )
