"""Lines that name ranks are read by people, also where there are 1,000."""

import pytest

from lm.distributed.naming import by_rank, name_ranks


@pytest.mark.parametrize(
    "ranks, name",
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([*range(15), 16], "ranks 0 to 14, 16"),
        ([2, 3, 5, 7, 8, 9], "ranks 2, 3, 5, 7 to 9"),
        (range(0, 1000, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and others, 500 in all"),
    ],
)
def test_ranks_are_named_by_their_stretches(ranks, name):
    assert name_ranks(ranks) == name


def test_values_are_told_with_their_ranks():
    assert by_rank(["a", None, "a", 2]) == "a on ranks 0, 2; null on rank 1; 2 on rank 3"
    assert by_rank([1] * 700 + [2] + [1] * 299) == "1 on ranks 0 to 699, 701 to 999; 2 on rank 700"
    assert by_rank(range(1000)).endswith("; 7 on rank 7; 992 other values")
