"""The tests of this directory do not depend on the launcher that started them."""

import os

import pytest


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch):
    """Remove the variables of the launchers, in case one of them started the tests."""
    for name in os.environ:
        if name.startswith(("OMPI_", "PMI", "HOROVOD_", "SLURM_")):
            monkeypatch.delenv(name)
