"""Remove the old checkpoints of a run that is training."""

import itertools
from collections.abc import Callable

from lm.checkpoint import store
from lm.checkpoint.manifest import (
    Checkpoint,
    Manifest,
    list_checkpoints,
    path_of,
    read_manifest,
    verify,
)


class Pruner:
    """Removes all checkpoints except the last `keep` and the best by validation perplexity.

    Only intact checkpoints count, so corrupt checkpoints never displace them. A checkpoint of an
    earlier job is verified only if the decision depends on it, because verifying many GB takes
    minutes. `resumed` is already verified. `after_file` is called after each verified file.
    """

    def __init__(
        self,
        run_dir: str,
        keep: int,
        resumed: Checkpoint | None = None,
        after_file: Callable[[], None] = lambda: None,
    ):
        self._run_dir, self._keep, self._after_file = run_dir, keep, after_file
        self._verified = {resumed.path: resumed.manifest} if resumed else {}
        self._unverified: dict[str, Manifest] | None = None  # None: not read yet

    def manifest(self, step: int) -> Manifest | None:
        """Return the manifest of the step's checkpoint if this job has written or verified it."""
        return self._verified.get(path_of(self._run_dir, step))

    def prune(self, saved: Checkpoint) -> None:
        """Remove old checkpoints after a save."""
        self._verified[saved.path] = saved.manifest
        checkpoints = list_checkpoints(self._run_dir)
        if len(checkpoints) <= self._keep:
            return
        newest_first = filter(self._is_intact, reversed(checkpoints))
        last = list(itertools.islice(newest_first, self._keep))
        if len(last) < self._keep:
            return
        kept = self._best(checkpoints)
        for checkpoint in checkpoints[: checkpoints.index(last[-1])]:
            if checkpoint not in kept:
                store.remove(checkpoint)
                self._verified.pop(checkpoint, None)

    def _best(self, checkpoints: list[str]) -> set[str | None]:
        readable = self._read_unverified() | self._verified
        present = {path: readable[path] for path in checkpoints if path in readable}
        # If --max_steps stopped the job within an epoch, a resumed run does not count the last
        # step.
        counted = {k: v for k, v in present.items() if v.step in v.progress.valid_steps}
        return {store.best_of(found, self._is_intact) for found in (present, counted)}

    def _read_unverified(self) -> dict[str, Manifest]:
        """Return the manifests of the other checkpoints of earlier jobs."""
        if self._unverified is None:
            found = store.usable(self._run_dir, lambda path: Checkpoint(path, read_manifest(path)))
            self._unverified = {path: v for path, v in found if path not in self._verified}
        return self._unverified

    def _is_intact(self, checkpoint: str) -> bool:
        if checkpoint in self._verified:
            return True
        if checkpoint not in self._read_unverified():  # It is corrupt, and a warning was logged.
            return False
        found = store.read_or_skip(checkpoint, lambda path: verify(path, self._after_file))
        del self._unverified[checkpoint]
        if found:
            self._verified[checkpoint] = found.manifest
        return found is not None
