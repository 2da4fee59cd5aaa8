"""Shared by the tests of networks."""

import pytest

from lm.config_file import load_config_file


@pytest.fixture
def load(tmp_path):
    """Load a config file of a text, or of the name of a config."""

    def load(text):
        if "\n" not in text:
            return load_config_file(text)
        (tmp_path / "mine.py").write_text(text)
        return load_config_file(str(tmp_path / "mine.py"))

    return load
