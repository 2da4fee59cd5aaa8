"""Fixtures for the tests of networks."""

import pytest

from lm.config_file import load_config_file


@pytest.fixture
def load(tmp_path):
    """Return a function that loads a config by name, or a config file with the given contents."""

    def load(text):
        if "\n" not in text:
            return load_config_file(text)
        (tmp_path / "mine.py").write_text(text)
        return load_config_file(str(tmp_path / "mine.py"))

    return load
