"""When and how a running job saves: rank 0 writes in the background."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

import tensorflow.compat.v1 as tf

from lm import logger
from lm.checkpoint import store, transfer
from lm.checkpoint.manifest import Manifest
from lm.checkpoint.progress import TrainProgress
from lm.checkpoint.tensors import Group
from lm.checkpoint.transfer import Arrays
from lm.config import RunOptions
from lm.distributed.agreement import weights_mismatch
from lm.distributed.communicator import Communicator
from lm.distributed.supervisor import Supervisor
from lm.errors import EveryRankError, RunError
from lm.model.windows import WindowRunner
from lm.record import RunRecord

_POLL_SECONDS = 0.2


class BackgroundWriter:
    """Writes the checkpoints of a run in a thread of rank 0, one at a time.

    The thread passes the weights to the operating system in groups, while training waits in
    `wait_until_read`. Training continues while the operating system writes them to the disk.
    If a checkpoint cannot be written, training continues: the previous checkpoint is intact, and
    a later save may succeed. `sync_events` flushes the events of the run before each save, so
    that a run resumed from the checkpoint has all earlier events, even after a power failure.
    """

    def __init__(self, run_dir: str, keep: int, sync_events: Callable[[], None] = lambda: None):
        self._run_dir, self._keep, self._sync_events = run_dir, keep, sync_events
        self._intact: dict[str, Manifest] | None = None  # verified at the first save
        self._thread: threading.Thread | None = None
        self._is_read = threading.Event()
        self.failure: RunError | None = None  # error of the last save

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until no checkpoint is being written, or until the time is over."""
        if self._thread:
            self._thread.join(seconds)

    def wait_until_read(self) -> None:
        """Wait until the thread has read all variables, or does not need them."""
        self._is_read.wait()

    def start(self, groups: Iterable[Group], manifest: Manifest) -> None:
        """Begin to write a checkpoint. The thread reads the groups."""
        assert not self.is_busy
        self._is_read.clear()
        self._thread = threading.Thread(
            target=self._write, args=(groups, manifest), name="checkpoint writer", daemon=True
        )
        self._thread.start()

    def _after_reading(self) -> None:
        self._is_read.set()
        self._sync_events()

    def _write(self, groups: Iterable[Group], manifest: Manifest) -> None:
        try:
            known = self._intact and self._intact.get(store.path_of(self._run_dir, manifest.step))
            saved = store.save(self._run_dir, groups, manifest, self._after_reading, known)
            if self.failure:
                logger.info("checkpoints can be written again")
            self.failure = None
        except Exception as error:  # no error may end this thread silently
            failed_before = self.failure is not None
            self.failure = error if isinstance(error, RunError) else RunError(repr(error))
            if not failed_before:  # warn once: the disk stays full
                logger.warning("%s; training continues", self.failure)
            return
        finally:
            self._is_read.set()
        try:
            if self._intact is None:
                self._intact = store.intact_manifests(self._run_dir)
            self._intact[saved.path] = saved.manifest
            store.prune(self._run_dir, self._keep, self._intact)
        except Exception as error:  # the next save tries again
            logger.warning("old checkpoints are not removed: %s", error)


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
                self._check_equal(progress, state)
            self._check_finite(progress, state)
        self._save(progress, state, in_sync=True)

    def _check_equal(self, progress: TrainProgress, state: Arrays) -> None:
        """Compare the weights of all ranks before a save, which records whether they differ."""
        with self._supervisor.exchange("the comparison of the weights"):
            parts = itertools.chain.from_iterable(self._reader.groups(self._session))
            mismatch = weights_mismatch(self._comm, ((part.name, part.array) for part in parts))
        if mismatch:
            self._fail_diverged(progress, state, mismatch)

    def _fail_diverged(self, progress: TrainProgress, state: Arrays, mismatch: str) -> NoReturn:
        try:
            self._check_finite(progress, state)
            # A run that continues with these weights is not exact.
            self._save(dataclasses.replace(progress, exact_with=None), state, in_sync=False)
            self.finish()
            outcome = "the weights of rank 0 are saved, and --resume loads them on all ranks"
        except EveryRankError as error:
            outcome = str(error)
        raise EveryRankError(
            f"at step {progress.step} the ranks disagree on the weights (checksum of {mismatch});"
            f" {outcome}. Look for hosts with different processors, devices or libraries, for a bug"
            " in the last change, or for bad memory if one rank differs"
        )

    def _check_finite(self, progress: TrainProgress, state: Arrays) -> None:
        graph, groups = self._session.graph, self._reader.groups(self._session, state)
        found = self._writer and transfer.first_not_finite(graph, groups)
        wild = self._comm.gather(found)[0]
        if wild:
            raise EveryRankError(
                f"{wild} is not finite after step {progress.step}, which is not saved: start a new"
                " run with --init_from an older checkpoint, and a lower learning_rate"
            )

    def _save(self, progress: TrainProgress, state: Arrays, in_sync: bool) -> None:
        self._overdue, self._saved_at = False, time.monotonic()
        self._saved_step = progress.step
        if self._writer:
            groups = self._reader.groups(self._session, state)
            self._writer.start(groups, self._manifest(progress, in_sync))
            with self._supervisor.alone("the writing of a checkpoint"):
                self._writer.wait_until_read()
        # Let the other ranks wait here, and not in the next step, which would be named instead.
        with self._supervisor.exchange(f"the save at step {progress.step}"):
            self._comm.barrier()

    def _manifest(self, progress: TrainProgress, in_sync: bool) -> Manifest:
        return Manifest(
            step=progress.step,
            world_size=self._comm.size,
            record=self._record,
            progress=dataclasses.replace(progress),  # a copy: the loop changes it during the save
            weights=transfer.weight_names(self._session.graph),
            valid_perplexity=progress.valid_perplexity,
            has_average=progress.num_averaged > 0,
            in_sync=in_sync,
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
        # A stop signal must not interrupt its own save.
        with self._supervisor.waiting("the writing of a checkpoint", stoppable=False) as waiting:
            while writer and writer.is_busy:
                writer.wait(_POLL_SECONDS)
                # Staying in touch is not progress: a disk that never answers must not block the
                # job forever.
                waiting.poll(progress=False)
            failure = str(writer.failure) if writer and writer.failure else None
            return waiting.gather(failure)[0]
