"""Token ids -> windows of [num_steps, rows], and which rows of the global batch a rank owns.

Every window is a pure function of (ids, step): nothing here has a state that a resumed or a
smaller job would have to reproduce.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lm.errors import UserError


class Rows(NamedTuple):
    """The contiguous rows [first, first + count) of the global batch that a rank owns."""

    first: int
    count: int
    # How many of them each virtual rank of this one has; () where there are none. Sums over rows
    # are made virtual rank by virtual rank, so that their bits depend on no number of real ones.
    shares: tuple[int, ...] = ()

    @property
    def slice(self) -> slice:
        """The rows of the global batch that these are."""
        return slice(self.first, self.first + self.count)


def rows_of_rank(batch_size: int, rank: int, size: int, virtual_ranks: int = 1) -> Rows:
    """Share the rows of the global batch over the ranks, differing by at most one row.

    Args:
      batch_size: Rows of the global batch.
      rank: This rank, from 0.
      size: Number of ranks.
      virtual_ranks: Into how many shares the sums over rows are divided. Where `size` divides it,
        a rank has as many whole neighbouring shares as the others; else one of its own.

    Returns:
      The rows of `rank`; those of all ranks are contiguous, in order, and disjoint.

    Raises:
      UserError: There are more ranks than rows.
    """
    if size > batch_size:
        raise UserError(
            f"batch_size is {batch_size} but there are {size} ranks: each rank needs a row, so"
            " raise batch_size or start fewer ranks"
        )
    if virtual_ranks % size:
        virtual_ranks = size
    each = virtual_ranks // size
    bounds = [v * batch_size // virtual_ranks for v in range(rank * each, (rank + 1) * each + 1)]
    shares = tuple(end - start for start, end in zip(bounds, bounds[1:]))
    return Rows(bounds[0], bounds[-1] - bounds[0], shares)


def eval_rows_of_rank(
    eval_batch_size: int, rank: int = 0, size: int = 1, shared: bool = False
) -> Rows:
    """Tell which rows of an evaluation a rank runs: its share, or all of them on rank 0.

    Unlike in training, a rank may have no row: the result is a sum, to which it adds nothing.

    Args:
      eval_batch_size: Rows of the evaluation.
      rank: This rank, from 0.
      size: Number of ranks.
      shared: Whether the ranks share the rows.
    """
    runners = min(size, eval_batch_size) if shared else 1
    if rank >= runners:
        return Rows(0, 0)
    return rows_of_rank(eval_batch_size, rank, runners)._replace(shares=())


class TrainBatches:
    """Windows for truncated back-propagation through time over one rank's rows.

    The split is cut into `batch_size` equal streams, one per row of the global batch; window s
    holds the tokens [s * num_steps, (s + 1) * num_steps) of each stream, and its targets are
    the tokens that follow. As in the published runs, the tokens left over at the end of the
    streams, fewer than num_steps + 1 of each row, are not trained on.

    Args:
      ids: The training split, int32 [tokens].
      batch_size: Rows of the global batch.
      num_steps: Time steps of a window.
      rows: The rows to return.

    Attributes:
      steps_per_epoch: Number of windows.
      rows: The rows.

    Raises:
      UserError: The split is too short for one window.
    """

    def __init__(self, ids: np.ndarray, batch_size: int, num_steps: int, rows: Rows):
        self._row_length = len(ids) // batch_size
        self.steps_per_epoch = max(self._row_length - 1, 0) // num_steps
        if self.steps_per_epoch == 0:
            raise UserError(
                f"the training split has {len(ids)} tokens, too few for batch_size {batch_size}"
                f" x num_steps {num_steps}: it needs at least {batch_size * (num_steps + 1)}"
            )
        self._streams = ids[: batch_size * self._row_length].reshape(batch_size, self._row_length)
        self.rows, self._num_steps = rows, num_steps

    def window(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets of a step of an epoch.

        Args:
          step: From 0 to steps_per_epoch - 1.

        Returns:
          Two int32 arrays [num_steps, rows]: the tokens, and the tokens after them.
        """
        assert 0 <= step < self.steps_per_epoch
        start = step * self._num_steps
        tokens = self._streams[self.rows.slice, start : start + self._num_steps + 1]
        return tokens[:, :-1].T, tokens[:, 1:].T


class EvalBatches:
    """Windows that count every token of a split as a target exactly once.

    The split is cut into `batch_size` streams whose lengths differ by at most one; the short
    ends are padded with mask 0. The input before a token is the token before it, and `<eos>`
    before the first one, as if a sentence had just ended.

    Args:
      ids: The split, int32 [tokens], at least one.
      batch_size: Number of streams; where there are fewer tokens, some are empty.
      num_steps: Time steps of a window.
      eos_id: Id of `<eos>`.
      rows: The streams to return, at least one.
    """

    def __init__(self, ids: np.ndarray, batch_size: int, num_steps: int, eos_id: int, rows: Rows):
        self._ids, self._num_steps, self._eos_id = ids, num_steps, eos_id
        bounds = np.arange(batch_size + 1, dtype=np.int64) * len(ids) // batch_size
        bounds = bounds[rows.first : rows.first + rows.count + 1]
        self._starts, self._ends = bounds[:-1], bounds[1:]
        longest = int((self._ends - self._starts).max())
        self.num_windows = -(-longest // num_steps)

    def window(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs and targets (int32), and which of them count (bool), [num_steps, rows]."""
        assert 0 <= index < self.num_windows
        at = self._starts + index * self._num_steps + np.arange(self._num_steps)[:, None]
        inside = at < self._ends
        at = np.minimum(at, len(self._ids) - 1)
        inputs = np.where(at > 0, self._ids[np.maximum(at - 1, 0)], self._eos_id)
        return inputs.astype(np.int32), self._ids[at], inside
