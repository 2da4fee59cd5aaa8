"""A search over two hosts, and one that two drivers share, with what they need cut off."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
from optuna.trial import TrialState

from lm.checkpoint import format as checkpoint
from lm.report.search import load_search
from tests.commands import ROOT, environment, kill_marked, new_mark
from tests.faults.jobs import events
from tests.faults.test_two_hosts import hosts, mpirun_options

__all__ = ["hosts"]

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for hosts and PostgreSQL's user"),
]

FLAGS = (
    "--config", "config_test", "--hidden_size", 8, "--num_steps", 5, "--batch_size", 400,
    "--num_epochs", 8, "--pruner", "none", "--checkpoint_every_steps", 150,
    "--space", "learning_rate=0.3:3:log", "--trials", 4, "--resume",
)  # fmt: skip


@pytest.fixture
def drive(corpora, tmp_path):
    """Start drivers of one search; what they leave is killed when the test ends."""
    marks = []

    def start(*flags, prefix=(), **env):
        marks.append(new_mark())
        command = [
            *prefix, sys.executable, "-m", "lm.search", *FLAGS, "--data_path", corpora,
            "--output_dir", tmp_path / "search", *flags,
        ]  # fmt: skip
        return subprocess.Popen(
            [str(word) for word in command], cwd=ROOT, env=environment(**env, **marks[-1]),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    yield start
    for mark in marks:
        kill_marked(mark)


@pytest.fixture
def database(tmp_path):
    """A PostgreSQL of this test's own; returns its address, and what shuts it down."""
    programs = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs or not shutil.which("runuser"):
        pytest.skip("needs PostgreSQL (Debian: apt install postgresql)")
    directory = f"/tmp/lm-postgresql-{os.getpid()}"  # its user cannot enter pytest's
    as_user = ["runuser", "-u", "postgres", "--"]
    subprocess.run(
        [*as_user, programs[-1] / "initdb", "-D", directory, "-A", "trust"],
        check=True, capture_output=True, cwd="/",
    )  # fmt: skip
    server = subprocess.Popen(
        [*as_user, programs[-1] / "postgres", "-D", directory, "-k", directory, "-h", ""],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
    )  # fmt: skip
    ready = [programs[-1] / "pg_isready", "-q", "-h", directory]
    wait_for(lambda: subprocess.run(ready).returncode == 0, server)

    def shut_down():
        if server.poll() is None:
            pid = pathlib.Path(directory, "postmaster.pid").read_text().split()[0]
            os.kill(int(pid), signal.SIGINT)  # at once, whoever is connected
            server.wait()

    yield f"postgresql://postgres@/postgres?host={directory}", shut_down
    shut_down()
    shutil.rmtree(directory)


def wait_for(condition, process, timeout=240):
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trial_dir(tmp_path, number):
    return tmp_path / f"search/trials/000{number}"


def has_begun(tmp_path, number):
    """Whether a trial has a checkpoint of the middle of its training."""
    return bool(checkpoint.list_checkpoints(str(trial_dir(tmp_path, number))))


def check_finished(tmp_path):
    """Check that all trials are finished, and that each step of each was done once."""
    trials = load_search(str(tmp_path / "search")).study.trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 4
    for number in range(4):
        epochs = [event["epoch"] for event in events(trial_dir(tmp_path, number), "epoch")]
        assert epochs == list(range(1, 9))


@pytest.mark.timeout(900)
def test_drivers_share_a_study_and_take_over_from_one_that_dies(drive, database, tmp_path):
    pytest.importorskip("psycopg2", reason="needs psycopg2-binary (setup.sh --dev)")
    address, shut_down = database
    shared = ("--storage", address, "--heartbeat_seconds", 1)
    first = drive(*shared)
    wait_for(lambda: has_begun(tmp_path, 0), first)
    second = drive(*shared)
    wait_for(lambda: has_begun(tmp_path, 1), second)
    first.kill()
    output = second.communicate(timeout=600)[0]
    assert second.returncode == 0, output
    check_finished(tmp_path)
    assert len(events(trial_dir(tmp_path, 0), "start")) == 2
    assert output.count("test perplexity") == 1

    third = drive(*shared, "--trials", 6)
    wait_for(lambda: has_begun(tmp_path, 4), third)
    shut_down()
    output = third.communicate(timeout=120)[0]
    assert third.returncode == 1
    (line,) = [line for line in output.splitlines() if line.startswith("lm: error: ")]
    assert "the study cannot be used: " in line and line.endswith("--resume")


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (shutil.which("ip") and os.path.exists("/usr/sbin/sshd")),
    reason="needs iproute2 and openssh-server",
)
def test_a_trial_goes_on_elsewhere_when_its_host_is_gone(drive, hosts, tmp_path):
    words = mpirun_options(hosts)
    options = {f"OMPI_MCA_{name}": value for name, value in zip(words[1::3], words[2::3])}
    driver = drive(
        "--hosts",
        "lmhost1:1,lmhost2:1",
        prefix=hosts("run", "lmhost1"),
        **options,
        PYTHONPATH=str(ROOT),
    )
    wait_for(lambda: has_begun(tmp_path, 0) and has_begun(tmp_path, 1), driver)
    machines = [events(trial_dir(tmp_path, number), "start")[0]["hosts"] for number in range(2)]
    assert sorted(machines) == [["lmhost1"], ["lmhost2"]]
    subprocess.run(hosts("cut"), check=True)
    output = driver.communicate(timeout=600)[0]
    assert driver.returncode == 0, output
    assert output.count("lmhost2 no longer answers") == 1
    check_finished(tmp_path)
    moved = trial_dir(tmp_path, machines.index(["lmhost2"]))
    assert [event["hosts"] for event in events(moved, "start")] == [["lmhost2"], ["lmhost1"]]
