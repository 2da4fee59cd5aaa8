"""The summary of a run at its start."""

import pytest

from lm.training.summary import _listed


@pytest.mark.parametrize("count, end", [(6, "f5 (SHA-256 abc...)"), (9, "and 3 more files")])
def test_the_summary_lists_at_most_five_loaded_files(count, end):
    text = _listed({f"f{i}": "abc" for i in range(count)})
    assert text.startswith("f0 (SHA-256 abc...), f1") and text.endswith(f", {end}")
    assert text.count("SHA-256") == 6
