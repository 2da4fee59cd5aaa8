"""Why a job has ended."""

import pytest

from lm.search.job import reason_in


@pytest.mark.parametrize(
    "said, reason",
    [
        ("lm: error: a\nlm: error: b\n", "b"),
        ("lm: error: Traceback (most recent call last):\n  x\nKeyError: 'a'\n\nDuring handling of"
         " the above exception, another exception occurred:\n\n  y\nValueError: c\ndetail\n",
         "ValueError: c"),
        ("lm: error: rank 1 on h: Traceback (most recent call last):\n  x\nKeyError: 'a'\n"
         "lm: error: b\n", "b"),
        ("lm: error: a\nmpirun noticed that b\n", "a"),
        ("mpirun noticed that b\n", "b"),
        ("", None),
    ],
)  # fmt: skip
def test_the_last_reason_that_is_told_is_found(said, reason):
    assert reason_in(said) == reason
