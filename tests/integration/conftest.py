"""Fixtures for the tests of the command lines."""

import fcntl
import pathlib
import shutil
import sys

import pytest

from tests import fork_server
from tests.commands import ROOT, run_command, train
from tests.download_server import DownloadServer


@pytest.fixture(scope="session")
def trained(session_dir, corpora):
    """A short run of lm.train, for the programs that use a run."""
    run_dir, unfinished = session_dir / "trained", session_dir / "unfinished"
    with open(session_dir / "trained.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second worker waits for the run of the first worker
        if not run_dir.exists():
            train(
                unfinished, "--config", "config_test", "--data_path", corpora, "--hidden_size", 24,
                "--max_steps", 150, "--log_every_steps", 10, "--tie_weights",
                "--embedding_size", 16, "--recurrent_keep_prob", 0.95, "--forget_bias", 1,
            )  # fmt: skip
            unfinished.rename(run_dir)
    return run_dir


@pytest.fixture
def project(tmp_path):
    """A copy of the project with this Python environment. Its setup.sh exits immediately.

    The fork server starts its Python programs.
    """
    copy, here = tmp_path / "project", pathlib.Path(sys.prefix)
    (copy / ".venv/bin").mkdir(parents=True)
    for path in (*here.glob("*"), *here.glob("bin/*")):
        if path.name not in ("bin", "python"):
            (copy / ".venv" / path.relative_to(here)).symlink_to(path)
    (copy / ".venv/bin/python").symlink_to(fork_server.start())
    for name in ("lm", "configs"):
        (copy / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "run_scripts", copy / "run_scripts")
    (copy / "run_scripts/setup.sh").write_text("#!/bin/sh\n")
    return copy


@pytest.fixture
def launch(tmp_path):
    """Run a script in a checkout without setup; shell scripts replace mpirun and others."""
    shutil.copytree(ROOT / "run_scripts", tmp_path / "run_scripts")
    (tmp_path / "run_scripts/setup.sh").write_text("#!/bin/sh\n")
    (tmp_path / "bin").mkdir()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\n[ "$2" != lm.distributed ] || PYTHONPATH={ROOT} exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)

    def run(name, mpirun='echo "$@"', others=(), cwd=tmp_path, arguments=("--max_steps", 1), **env):
        for command, stand_in in {"mpirun": mpirun, **dict(others)}.items():
            (tmp_path / "bin" / command).write_text(f"#!/bin/sh\n{stand_in}\n")
            (tmp_path / "bin" / command).chmod(0o755)
        return run_command(
            ["bash", tmp_path / "run_scripts" / name, *arguments],
            {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **env}, timeout=30, cwd=cwd,
        )  # fmt: skip

    return run


@pytest.fixture
def no_proxy(monkeypatch):
    """Connect to the loopback address directly, even if the environment names a proxy."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server(no_proxy):
    """An HTTP server that misbehaves on request."""
    with DownloadServer() as running:
        yield running


@pytest.fixture
def target(no_proxy, tmp_path):
    """A directory for PTB, which does not exist yet."""
    return tmp_path / "data"
