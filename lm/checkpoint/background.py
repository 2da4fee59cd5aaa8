"""Write checkpoints in a thread of rank 0, and remove old checkpoints."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from lm import logger
from lm.checkpoint import store
from lm.checkpoint.manifest import Checkpoint, Manifest
from lm.checkpoint.pruning import Pruner
from lm.checkpoint.tensors import Group
from lm.errors import RunError

_WARN_SECONDS = 3600.0  # between two warnings about a disk that stays full


class BackgroundWriter:
    """Writes the checkpoints of a run in a thread of rank 0, one at a time.

    The thread passes the weights to the operating system in groups, while training waits in
    `wait_until_read`. Training continues while the operating system writes them to the disk.
    If a checkpoint cannot be written, training continues: the previous checkpoint is intact, and
    a later save may succeed. `sync_events` flushes the events of the run before each save, so
    that a run resumed from the checkpoint has all earlier events, even after a power failure.
    `resumed` is the checkpoint that the run was resumed from.
    """

    def __init__(
        self,
        run_dir: str,
        keep: int,
        sync_events: Callable[[], None] = lambda: None,
        resumed: Checkpoint | None = None,
    ):
        self._run_dir, self._sync_events = run_dir, sync_events
        self._pruner = Pruner(run_dir, keep, resumed, self._advance)
        self._thread: threading.Thread | None = None
        self._is_read = threading.Event()
        self.num_advances = 0  # grows while the disk answers
        self.failure: RunError | None = None  # error of the last save
        self._warn_at = 0.0  # earliest time of the next warning, on the monotonic clock

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no checkpoint is being written, or until the time is over (False)."""
        if self._thread:
            self._thread.join(seconds)
        return not self.is_busy

    def wait_until_read(self, seconds: float | None = None) -> bool:
        """Wait until the thread needs no variables, or until the time is over (False)."""
        return self._is_read.wait(seconds)

    def start(self, groups: Iterable[Group], manifest: Manifest) -> None:
        """Begin to write a checkpoint. The thread reads the groups."""
        assert not self.is_busy
        self._is_read.clear()
        self._thread = threading.Thread(
            target=self._write, args=(groups, manifest), name="checkpoint writer", daemon=True
        )
        self._thread.start()

    def _advance(self) -> None:
        self.num_advances += 1

    def _advancing(self, groups: Iterable[Group]) -> Iterator[Group]:
        for group in groups:
            self._advance()
            yield group

    def _after_reading(self) -> None:
        self._is_read.set()
        self._sync_events()

    def _write(self, groups: Iterable[Group], manifest: Manifest) -> None:
        try:
            saved = store.save(
                self._run_dir,
                self._advancing(groups),
                manifest,
                after_reading=self._after_reading,
                after_file=self._advance,
                known=self._pruner.manifest(manifest.step),
            )
            if self.failure:
                logger.info("checkpoints can be written again")
            self.failure, self._warn_at = None, 0.0
        except Exception as error:  # no error may end this thread silently
            self.failure = error if isinstance(error, RunError) else RunError(repr(error))
            if time.monotonic() >= self._warn_at:
                self._warn_at = time.monotonic() + _WARN_SECONDS
                logger.warning("%s; training continues without new checkpoints", self.failure)
            return
        finally:
            self._is_read.set()
        try:
            self._pruner.prune(saved)
        except Exception as error:  # the next save tries again
            logger.warning("old checkpoints are not removed: %s", error)
