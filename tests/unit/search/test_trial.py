"""The outcome of a job."""

import pytest

from lm.search.trial import last_error


@pytest.mark.parametrize(
    "output, error",
    [
        (b"lm: error: a\nlm: error: b\xe4\nlater\n", "b\N{REPLACEMENT CHARACTER}"),
        (b"lm: error: rank 1 on h: Traceback (most recent call last):\n  x\nKeyError: 'a'\n", None),
        (b"", None),
    ],
)
def test_the_last_error_of_a_program_is_found(output, error):
    assert last_error(output) == error
