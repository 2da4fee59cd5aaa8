"""Shared by the tests of the command lines."""

import pytest

from tests.commands import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory, corpora):
    """A run of lm.train, a few seconds of it, for the programs that use a run."""
    run_dir = tmp_path_factory.mktemp("runs") / "trained"
    train(
        run_dir, "--config", "config_test", "--data_path", corpora, "--hidden_size", 24,
        "--max_steps", 150, "--log_every_steps", 10,
    )  # fmt: skip
    return run_dir
