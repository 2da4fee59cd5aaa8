"""Write checkpoints in a thread of rank 0, and remove old checkpoints."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from lm import logger
from lm.checkpoint import store
from lm.checkpoint.manifest import Manifest, list_checkpoints
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
    """

    def __init__(self, run_dir: str, keep: int, sync_events: Callable[[], None] = lambda: None):
        self._run_dir, self._keep, self._sync_events = run_dir, keep, sync_events
        self._intact: dict[str, Manifest] | None = None  # verified at the first save
        self._thread: threading.Thread | None = None
        self._is_read = threading.Event()
        self.failure: RunError | None = None  # error of the last save
        self._warn_at = 0.0  # earliest time of the next warning, on the monotonic clock

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
            if self._intact is None:
                self._intact = dict(store.usable(self._run_dir, store.verify))
            self._intact[saved.path] = saved.manifest
            prune(self._run_dir, self._keep, self._intact)
        except Exception as error:  # the next save tries again
            logger.warning("old checkpoints are not removed: %s", error)


def prune(run_dir: str, keep: int, intact: Mapping[str, Manifest]) -> None:
    """Remove all checkpoints except the last `keep` and the best by validation perplexity.

    Only the checkpoints in `intact`, which this job wrote or verified, count. Corrupt checkpoints
    therefore never displace intact checkpoints.
    """
    checkpoints = list_checkpoints(run_dir)
    present = {found: intact[found] for found in checkpoints if found in intact}
    if len(present) < keep:
        return
    # If --max_steps stopped the job within an epoch, a resumed run does not count the last step.
    counted = {k: v for k, v in present.items() if v.step in v.progress.valid_steps}
    kept = {store.best_of(present), store.best_of(counted)}
    for checkpoint in checkpoints[: checkpoints.index(list(present)[-keep])]:
        if checkpoint not in kept:
            store.remove(checkpoint)
