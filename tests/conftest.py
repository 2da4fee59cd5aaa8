"""Settings and fixtures for all tests."""

import gc
import os
import signal

import hypothesis
import pytest

# Examples may be slow because other processes use the cores. This must not fail a test.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Hide the messages that TensorFlow prints at startup.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# A shell ignores SIGINT in its background jobs, and their child processes inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Programs that find this variable do not start again to set it. A fork cannot start again.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def pytest_collection_finish():
    """Exclude the objects of imported modules from garbage collections, which then take less."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def session_dir(tmp_path_factory):
    """Return a directory that all pytest-xdist workers of this test session share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def corpora(session_dir):
    """Return a data_path that all tests share, so the synthetic corpus is generated only once."""
    path = session_dir / "data"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="session")
def ptb_archive():
    """Return the path of the PTB archive. Its license does not allow adding it to this project."""
    path = os.environ.get("PTB_ARCHIVE")
    if not path:
        pytest.skip("needs the PTB archive: set PTB_ARCHIVE to simple-examples.tgz")
    return path


@pytest.fixture(params=["compiled", "plain"])
def implementation(request, monkeypatch):
    """Run a test with the compiled ops, and again with plain TensorFlow, their fallback."""
    from lm import kernels

    if request.param == "plain":
        monkeypatch.setattr(kernels, "available", lambda: False)
    elif not kernels.available():
        pytest.skip(kernels.description())
