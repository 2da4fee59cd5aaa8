"""Cut token IDs into windows [num_steps, rows], and assign rows of the global batch to ranks.

Every window is a pure function of (ids, seed, step), so that a job can resume on a different number
of ranks without any saved state.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

from lm.errors import UserError


class Rows(NamedTuple):
    """The contiguous rows [first, first + count) of the global batch that one rank processes."""

    first: int
    count: int
    # The number of rows of each virtual rank, or () without virtual ranks. Sums over rows are
    # computed per micro-batch, so that their bits do not depend on the number of real ranks.
    micro_batches: tuple[int, ...] = ()

    @property
    def slice(self) -> slice:
        """These rows as a slice of the global batch."""
        return slice(self.first, self.first + self.count)

    def first_micro_batches(self, count: int) -> Rows:
        """Return the first rows: as many micro-batches as are computed at once.

        The count is rounded down to a power of two, because sums are binary trees of micro-batches.
        """
        sizes = self.micro_batches
        count = min(1 << count.bit_length() - 1, len(sizes))
        if sizes != sizes[:count] * (len(sizes) // count):
            raise UserError(
                f"micro_batches_at_once {count} needs micro-batches of equal size, not of"
                f" {min(sizes)} and {max(sizes)} rows: use a batch_size that virtual_ranks divides"
            )
        return Rows(self.first, sum(sizes[:count]), sizes[:count])


def rows_of_rank(batch_size: int, rank: int, size: int, virtual_ranks: int = 1) -> Rows:
    """Return the rows of one of `size` ranks. The row counts of two ranks differ by at most one.

    If virtual_ranks, the number of micro-batches in the global batch, is a multiple of `size`,
    each rank gets the same number of neighboring micro-batches. Otherwise, the rows of each rank
    are one micro-batch.
    """
    if size > batch_size:
        raise UserError(
            f"batch_size is {batch_size} but there are {size} ranks; each rank needs at least"
            " one row, so raise batch_size or start fewer ranks"
        )
    if virtual_ranks % size:
        virtual_ranks = size
    each = virtual_ranks // size
    bounds = [v * batch_size // virtual_ranks for v in range(rank * each, (rank + 1) * each + 1)]
    micro_batches = tuple(end - start for start, end in itertools.pairwise(bounds))
    return Rows(bounds[0], bounds[-1] - bounds[0], micro_batches)


def eval_rows_of_rank(
    eval_batch_size: int, rank: int = 0, size: int = 1, shared: bool = False, group: int = 1
) -> Rows:
    """Return the rows of an evaluation that a rank runs, a multiple of `group` rows.

    If the rows are not shared, rank 0 runs all rows. Unlike in training, a rank may have no rows.
    The last rank may have rows beyond the batch, which `EvalBatches` pads.
    """
    num_groups = -(-eval_batch_size // group)
    num_active = min(size, num_groups) if shared else 1
    if rank >= num_active:
        return Rows(0, 0)
    groups = rows_of_rank(num_groups, rank, num_active)
    return Rows(groups.first * group, groups.count * group)


class TrainBatches:
    """Training windows for truncated backpropagation through time, for the rows of one rank.

    The split (int32 [tokens]) is cut into `batch_size` equal streams, one per row of the global
    batch. Window s of an epoch contains the tokens [s * num_steps, (s + 1) * num_steps) of each
    stream. Its targets are the next tokens. As in the published runs, the tokens at the end of each
    stream that do not fill a window are not used.

    With a `shuffle_seed`, the split is not cut into streams. Each epoch has the same number of
    windows, which are neighbors in the split, and visits each window once in a random order. The
    first window starts at a random token. Each epoch therefore cuts the split at different tokens,
    and skips different tokens at the ends of the split.
    """

    def __init__(
        self,
        ids: np.ndarray,
        batch_size: int,
        num_steps: int,
        rows: Rows,
        shuffle_seed: int | None = None,
    ):
        self._row_length = len(ids) // batch_size
        self.steps_per_epoch = max(self._row_length - 1, 0) // num_steps
        if self.steps_per_epoch == 0:
            raise UserError(
                f"the training split has {len(ids)} tokens, too few for batch_size {batch_size}"
                f" x num_steps {num_steps}; it needs at least {batch_size * (num_steps + 1)}"
            )
        self._ids, self._batch_size, self._num_steps = ids, batch_size, num_steps
        self.rows, self._shuffle_seed = rows, shuffle_seed

    def window(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets, int32 [num_steps, rows], of a step of the run."""
        tokens = self._ids[self._starts(step) + np.arange(self._num_steps + 1)[:, None]]
        return tokens[:-1], tokens[1:]

    def _starts(self, step: int) -> np.ndarray:
        """Return the position of the first input of each row, int64 [rows]."""
        epoch, step = divmod(step, self.steps_per_epoch)
        rows = np.arange(self._batch_size)[self.rows.slice]
        if self._shuffle_seed is None:
            return rows * self._row_length + step * self._num_steps
        num_windows = self.steps_per_epoch * self._batch_size
        num_skipped = len(self._ids) - 1 - num_windows * self._num_steps
        offset, order = _shuffled(self._shuffle_seed, epoch, num_windows, num_skipped)
        return offset + order[step * self._batch_size + rows] * self._num_steps


@functools.lru_cache(maxsize=1)
def _shuffled(seed: int, epoch: int, num_windows: int, num_skipped: int) -> tuple[int, np.ndarray]:
    """Return the first token of an epoch and the order of its windows, int64 [windows].

    The order needs 8 bytes per window, and twice as much when an epoch starts.
    """
    # NumPy guarantees that RandomState returns the same numbers in all versions. The numbers of
    # newer generators may change. A seed has up to 62 bits, and RandomState accepts 32-bit words.
    random = np.random.RandomState([*divmod(seed, 2**32), epoch])
    return random.randint(num_skipped + 1), random.permutation(num_windows)


class EvalBatches:
    """Evaluation windows, in which every token of a split is a target exactly once.

    The split (int32 [tokens], not empty) is cut into `batch_size` streams. Their lengths differ by
    at most one, and the last window is padded with mask 0, as are rows beyond the batch. The input
    for a target is the previous token. The input for the first token is `<eos>`, as if a sentence
    had just ended.
    """

    def __init__(self, ids: np.ndarray, batch_size: int, num_steps: int, eos_id: int, rows: Rows):
        self._ids, self._num_steps, self._eos_id = ids, num_steps, eos_id
        bounds = np.arange(batch_size + 1, dtype=np.int64) * len(ids) // batch_size
        bounds = np.pad(bounds, (0, rows.count), mode="edge")[rows.first :][: rows.count + 1]
        self._starts, self._ends = bounds[:-1], bounds[1:]
        longest = int((self._ends - self._starts).max())
        self.num_windows = -(-longest // num_steps)

    def window(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs, targets (int32) and the mask of targets that count, [num_steps, rows]."""
        assert 0 <= index < self.num_windows
        at = self._starts + index * self._num_steps + np.arange(self._num_steps)[:, None]
        inside = at < self._ends
        at = np.minimum(at, len(self._ids) - 1)
        inputs = np.where(at > 0, self._ids[np.maximum(at - 1, 0)], self._eos_id)
        return inputs.astype(np.int32), self._ids[at], inside
