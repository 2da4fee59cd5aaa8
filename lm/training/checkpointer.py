"""Saves of a running job: rank 0 writes in the background."""

import dataclasses
import itertools
import time
from collections.abc import Callable

import tensorflow.compat.v1 as tf

from lm import logger
from lm.checkpoint import transfer
from lm.checkpoint.background import BackgroundWriter
from lm.checkpoint.manifest import Manifest
from lm.checkpoint.progress import TrainProgress
from lm.checkpoint.transfer import Arrays
from lm.config import RunOptions
from lm.distributed.agreement import weights_mismatch
from lm.distributed.communicator import Communicator
from lm.distributed.supervisor import Supervisor
from lm.errors import Diverged, EveryRankError
from lm.model.windows import WindowRunner
from lm.record import RunRecord

_POLL_SECONDS = 0.2


class Checkpointer:
    """Saves a run. All ranks must call each method, except `is_due`, at the same point.

    Only rank 0 has a writer. `runner` has the recurrent state.
    """

    def __init__(
        self,
        writer: BackgroundWriter | None,
        record: RunRecord,
        options: RunOptions,
        comm: Communicator,
        session: tf.Session,
        reader: transfer.VariableReader,
        runner: WindowRunner,
        supervisor: Supervisor,
    ):
        self._writer, self._record, self._options = writer, record, options
        self._comm, self._session, self._reader, self._runner = comm, session, reader, runner
        self._supervisor = supervisor
        self._overdue, self._saved_at = False, time.monotonic()
        self._saved_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether rank 0 wants to save at this step. Call this method once per step.

        While a checkpoint is being written, later saves are postponed.
        """
        if self._writer is None:
            return False
        every_steps = self._options.checkpoint_every_steps
        if every_steps and step % every_steps == 0:
            self._overdue = True
        if time.monotonic() - self._saved_at > 60 * self._options.checkpoint_every_minutes:
            self._overdue = True
        return self._overdue and not self._writer.is_busy

    def save(self, progress: TrainProgress) -> None:
        """Save in the background on rank 0. Training may continue when this method returns."""
        failure = self.wait()
        state = transfer.gather_state(self._runner.state, self._comm.concat)
        # After a validation, the step may be saved again, because the perplexity is known now.
        if failure or progress.step != self._saved_step:
            if self._comm.size > 1:
                self._check_equal(progress.step)
            self._check_finite(progress.step, state)
        self._save(progress, state)

    def _check_equal(self, step: int) -> None:
        """Compare the weights of all ranks.

        Different weights are not saved: if a bit has flipped in the weights of one rank, its
        gradients have changed the weights of all ranks since then.
        """
        with self._supervisor.exchange("the comparison of the weights"):
            parts = itertools.chain.from_iterable(self._reader.groups(self._session))
            mismatch = weights_mismatch(self._comm, ((part.name, part.array) for part in parts))
        if mismatch:
            raise EveryRankError(
                f"at step {step} the ranks disagree on the weights (checksum of {mismatch}); this"
                " step is not saved, and --resume continues from the last checkpoint. Look for"
                " hosts with different processors, devices or libraries, for a bug in the last"
                " change, or for bad memory if one rank differs"
            )

    def _check_finite(self, step: int, state: Arrays) -> None:
        graph, groups = self._session.graph, self._reader.groups(self._session, state)
        found = self._writer and transfer.first_not_finite(graph, groups)
        wild = self._comm.gather(found)[0]
        if wild:
            raise Diverged(
                f"{wild} is not finite after step {step}, which is not saved: start a new"
                " run with --init_from an older checkpoint, and a lower learning_rate"
            )

    def _save(self, progress: TrainProgress, state: Arrays) -> None:
        self._overdue, self._saved_at = False, time.monotonic()
        self._saved_step = progress.step
        if self._writer:
            groups = self._reader.groups(self._session, state)
            self._writer.start(groups, self._manifest(progress))
        self._wait(self._writer and self._writer.wait_until_read)

    def _manifest(self, progress: TrainProgress) -> Manifest:
        return Manifest(
            world_size=self._comm.size,
            record=self._record,
            progress=dataclasses.replace(progress),  # a copy: the loop changes it during the save
            weights=tuple(transfer.weight_variables(self._session.graph)),
        )

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        failure = self.wait()
        if failure:
            raise EveryRankError(failure)

    def wait(self) -> str | None:
        """Wait until no checkpoint is being written; return why the last save failed, or None."""
        writer = self._writer
        if writer and writer.is_busy:
            logger.info("waiting until the last checkpoint is written")
        return self._wait(writer and writer.wait)

    def _wait(self, wait: Callable[[float], bool] | None) -> str | None:
        """Wait on all ranks for rank 0, as long as its disk answers; return the last failure."""
        # A stop signal must not interrupt its own save.
        with self._supervisor.waiting("the writing of a checkpoint", stoppable=False) as waiting:
            before = -1
            while wait and not wait(_POLL_SECONDS):
                # Waiting is not progress: a disk that never answers must not block the job forever.
                advances = self._writer.num_advances
                waiting.poll(progress=advances > before)
                before = advances
            failure = str(self._writer.failure) if wait and self._writer.failure else None
            return waiting.gather(failure)[0]
