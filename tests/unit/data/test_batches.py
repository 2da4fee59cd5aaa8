"""Windows, and the rows of each rank."""

import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.batches import EvalBatches, Rows, TrainBatches, eval_rows_of_rank, rows_of_rank
from lm.errors import UserError
from lm.options import MAX_SEED


@given(batch_size=st.integers(1, 200), data=st.data())
def test_rows_of_ranks_are_contiguous_disjoint_and_even(batch_size, data):
    size = data.draw(st.integers(1, batch_size))
    ranks = [rows_of_rank(batch_size, rank, size) for rank in range(size)]
    assert ranks[0].first == 0
    for before, after in itertools.pairwise(ranks):
        assert after.first == before.first + before.count
    assert ranks[-1].first + ranks[-1].count == batch_size
    assert max(rows.count for rows in ranks) - min(rows.count for rows in ranks) <= 1


@given(batch_size=st.integers(8, 200))
def test_ranks_have_neighboring_micro_batches(batch_size):
    whole = rows_of_rank(batch_size, 0, 1, virtual_ranks=8).micro_batches
    assert sum(whole) == batch_size and max(whole) - min(whole) <= 1
    for size in (2, 4, 8):
        ranks = [rows_of_rank(batch_size, rank, size, virtual_ranks=8) for rank in range(size)]
        assert sum((rows.micro_batches for rows in ranks), ()) == whole
        assert all(sum(rows.micro_batches) == rows.count for rows in ranks)
    # 3 ranks do not divide 8 virtual ranks: the rows of each rank are one micro-batch.
    assert rows_of_rank(batch_size, 1, 3, virtual_ranks=8).micro_batches == (
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
    seed=st.none() | st.integers(0, MAX_SEED),
    data=st.data(),
)
def test_the_windows_of_all_ranks_form_the_global_window(tokens, batch_size, num_steps, seed, data):
    ids = np.arange(tokens, dtype=np.int32)
    if tokens < batch_size * (num_steps + 1):
        with pytest.raises(UserError, match="too few for batch_size"):
            TrainBatches(ids, batch_size, num_steps, Rows(0, batch_size))
        return
    size = data.draw(st.integers(1, batch_size))
    whole = TrainBatches(ids, batch_size, num_steps, Rows(0, batch_size), seed)
    ranks = [
        TrainBatches(ids, batch_size, num_steps, rows_of_rank(batch_size, rank, size), seed)
        for rank in range(size)
    ]
    trained, first = [], data.draw(st.integers(0, 200)) * whole.steps_per_epoch
    for step in range(first, first + whole.steps_per_epoch):
        inputs, targets = whole.window(step)
        np.testing.assert_array_equal(
            inputs, np.concatenate([rank.window(step)[0] for rank in ranks], axis=1)
        )
        np.testing.assert_array_equal(targets, inputs + 1)
        trained.extend(targets.ravel())
    assert len(set(trained)) == len(trained)  # no token is trained twice in an epoch


def starts_of_epoch(batches, epoch):
    """Return the first inputs of all windows of an epoch, in their order."""
    steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
    return [start for step in steps for start in batches.window(step)[0][0].tolist()]


@given(
    tokens=st.integers(20, 300),
    batch_size=st.integers(1, 4),
    num_steps=st.integers(1, 4),
    seed=st.integers(0, MAX_SEED),
    epoch=st.integers(0, 1000),
)
def test_a_shuffled_epoch_visits_each_window_once(tokens, batch_size, num_steps, seed, epoch):
    sizes = np.arange(tokens, dtype=np.int32), batch_size, num_steps, Rows(0, batch_size)
    starts = starts_of_epoch(TrainBatches(*sizes, seed), epoch)
    first, num_trained = min(starts), len(starts) * num_steps
    assert sorted(starts) == [*range(first, first + num_trained, num_steps)]
    assert len(starts) == TrainBatches(*sizes).steps_per_epoch * batch_size


def test_each_shuffled_epoch_has_a_different_order_and_offset():
    sizes = np.arange(1000, dtype=np.int32), 3, 7, Rows(0, 3)
    by_epoch = {
        (seed, epoch): starts_of_epoch(TrainBatches(*sizes, seed), epoch)
        for seed in (1, 2, 2**32 + 1, MAX_SEED)
        for epoch in (0, 1, 2, 100)
    }
    assert len(set(map(tuple, by_epoch.values()))) == len(by_epoch)
    offsets = {min(starts_of_epoch(TrainBatches(*sizes, 1), epoch)) for epoch in range(100)}
    assert offsets == {*range(1000 - 7 * len(by_epoch[1, 0]))}  # all that leave room for a target
    # Each version of NumPy must return these numbers. Otherwise, resumed runs would differ.
    assert by_epoch[1, 100][:6] == [188, 489, 209, 132, 909, 223]
    assert by_epoch[MAX_SEED, 0][:6] == [164, 381, 570, 150, 3, 584]


def test_a_shuffled_epoch_of_a_large_corpus_starts_within_a_second():
    ids = np.broadcast_to(np.int32(0), 103_000_000)
    batches = TrainBatches(ids, 20, 35, Rows(0, 20), shuffle_seed=1)
    tracemalloc.start()
    try:
        start = time.process_time()
        batches.window(100 * batches.steps_per_epoch + 5)
        assert time.process_time() - start < 1
        batches.window(101 * batches.steps_per_epoch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16.01 * 20 * batches.steps_per_epoch  # bytes per window


@given(
    tokens=st.integers(1, 200),
    batch_size=st.integers(1, 9),
    num_steps=st.integers(1, 8),
    size=st.one_of(st.just(1), st.integers(1, 12)),
)
def test_ranks_together_evaluate_each_token_once(tokens, batch_size, num_steps, size):
    ids, eos = np.arange(tokens, dtype=np.int32), 999
    counted = []
    for rank in range(size):
        rows = eval_rows_of_rank(batch_size, rank, size, shared=True)
        if rows.count:
            batches = EvalBatches(ids, batch_size, num_steps, eos, rows)
            for inputs, targets, mask in map(batches.window, range(batches.num_windows)):
                assert inputs.shape == targets.shape == mask.shape == (num_steps, rows.count)
                expected = np.where(targets == 0, eos, targets - 1)
                np.testing.assert_array_equal(inputs[mask], expected[mask])
                counted.extend(targets[mask])
    assert sorted(counted) == list(range(tokens))


def test_only_rank_0_evaluates_unless_rows_are_shared():
    assert eval_rows_of_rank(7) == eval_rows_of_rank(7, 0, 3) == Rows(0, 7)
    assert eval_rows_of_rank(7, 2, 3).count == 0
