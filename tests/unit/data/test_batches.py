"""Windows and shares of rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.batches import EvalBatches, Rows, TrainBatches, eval_rows_of_rank, rows_of_rank
from lm.errors import UserError


@given(batch_size=st.integers(1, 200), data=st.data())
def test_shares_are_contiguous_disjoint_and_even(batch_size, data):
    size = data.draw(st.integers(1, batch_size))
    shares = [rows_of_rank(batch_size, rank, size) for rank in range(size)]
    assert shares[0].first == 0
    for before, after in zip(shares, shares[1:]):
        assert after.first == before.first + before.count
    assert shares[-1].first + shares[-1].count == batch_size
    assert max(share.count for share in shares) - min(share.count for share in shares) <= 1


@given(batch_size=st.integers(8, 200))
def test_ranks_have_neighbouring_shares_of_one(batch_size):
    shares = rows_of_rank(batch_size, 0, 1, virtual_ranks=8).shares
    assert sum(shares) == batch_size and max(shares) - min(shares) <= 1
    for size in (2, 4, 8):
        ranks = [rows_of_rank(batch_size, rank, size, virtual_ranks=8) for rank in range(size)]
        assert sum((rows.shares for rows in ranks), ()) == shares
        assert all(sum(rows.shares) == rows.count for rows in ranks)
    # Where the ranks do not divide them, each has one share: its own rows.
    assert rows_of_rank(batch_size, 1, 3, virtual_ranks=8).shares == (
        rows_of_rank(batch_size, 1, 3).count,
    )


def test_more_ranks_than_rows_is_an_error():
    with pytest.raises(UserError, match="batch_size is 3 but there are 4 ranks"):
        rows_of_rank(3, 0, 4)


def test_windows_follow_the_streams():
    ids = np.arange(23, dtype=np.int32)  # 2 streams of 11: 0..10 and 11..21
    batches = TrainBatches(ids, batch_size=2, num_steps=3, rows=Rows(0, 2))
    assert batches.steps_per_epoch == 3
    inputs, targets = batches.window(1)
    np.testing.assert_array_equal(inputs.T, [[3, 4, 5], [14, 15, 16]])
    np.testing.assert_array_equal(targets.T, [[4, 5, 6], [15, 16, 17]])


@given(
    tokens=st.integers(2, 300),
    batch_size=st.integers(1, 6),
    num_steps=st.integers(1, 7),
    data=st.data(),
)
def test_the_shares_of_all_ranks_make_the_global_window(tokens, batch_size, num_steps, data):
    ids = np.arange(tokens, dtype=np.int32)
    if tokens < batch_size * (num_steps + 1):
        with pytest.raises(UserError, match="too few for batch_size"):
            TrainBatches(ids, batch_size, num_steps, Rows(0, batch_size))
        return
    size = data.draw(st.integers(1, batch_size))
    whole = TrainBatches(ids, batch_size, num_steps, Rows(0, batch_size))
    shares = [
        TrainBatches(ids, batch_size, num_steps, rows_of_rank(batch_size, rank, size))
        for rank in range(size)
    ]
    trained = []
    for step in range(whole.steps_per_epoch):
        inputs, targets = whole.window(step)
        np.testing.assert_array_equal(
            inputs, np.concatenate([share.window(step)[0] for share in shares], axis=1)
        )
        np.testing.assert_array_equal(targets, inputs + 1)
        trained.extend(targets.ravel())
    assert len(set(trained)) == len(trained)  # no token is trained twice in an epoch


@given(tokens=st.integers(1, 200), batch_size=st.integers(1, 9), num_steps=st.integers(1, 8))
def test_evaluation_counts_every_token_once_after_its_predecessor(tokens, batch_size, num_steps):
    ids, eos = np.arange(tokens, dtype=np.int32), 999
    batches = EvalBatches(ids, batch_size, num_steps, eos, Rows(0, batch_size))
    counted = []
    for index in range(batches.num_windows):
        inputs, targets, mask = batches.window(index)
        assert inputs.shape == targets.shape == mask.shape == (num_steps, batch_size)
        counted.extend(targets[mask])
        expected = np.where(targets == 0, eos, targets - 1)
        np.testing.assert_array_equal(inputs[mask], expected[mask])
    assert sorted(counted) == list(range(tokens))


@given(
    tokens=st.integers(1, 200),
    batch_size=st.integers(1, 9),
    num_steps=st.integers(1, 8),
    size=st.integers(1, 12),
)
def test_the_ranks_together_evaluate_each_token_once(tokens, batch_size, num_steps, size):
    ids = np.arange(tokens, dtype=np.int32)
    counted = []
    for rank in range(size):
        rows = eval_rows_of_rank(batch_size, rank, size, shared=True)
        if rows.count:
            batches = EvalBatches(ids, batch_size, num_steps, 999, rows)
            for _, targets, mask in map(batches.window, range(batches.num_windows)):
                assert mask.shape == (num_steps, rows.count)
                counted.extend(targets[mask])
    assert sorted(counted) == list(range(tokens))


def test_unless_shared_rank_0_evaluates_all_rows():
    assert eval_rows_of_rank(7) == eval_rows_of_rank(7, 0, 3) == Rows(0, 7)
    assert eval_rows_of_rank(7, 2, 3).count == 0
