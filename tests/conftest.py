"""Shared by all tests."""

import os

import hypothesis
import pytest

# An example that is slow, because other processes have the cores, is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Tests run on machines that have other work to do; TensorFlow's start-up lines help nobody.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture(scope="session")
def session_dir(tmp_path_factory):
    """A directory of this test session, one for all of pytest-xdist's workers."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def corpora(session_dir):
    """A data_path shared by the tests, so that the embedded corpus is made once."""
    path = session_dir / "data"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="session")
def ptb_archive():
    """Path of the PTB archive, which is licensed text and not part of this project."""
    path = os.environ.get("PTB_ARCHIVE")
    if not path:
        pytest.skip("needs the PTB archive: set PTB_ARCHIVE to simple-examples.tgz")
    return path


@pytest.fixture(params=["compiled", "plain"])
def path(request, monkeypatch):
    """Run a test with the compiled ops, and with the plain TensorFlow that they fall back to."""
    from lm import kernels

    if request.param == "plain":
        monkeypatch.setattr(kernels, "available", lambda: False)
    elif not kernels.available():
        pytest.skip(kernels.description())
