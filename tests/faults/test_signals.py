"""After a signal, all ranks stop at the same step, save once, and exit with its exit code."""

import fcntl
import os
import pty
import signal
import termios

import pytest

from lm.checkpoint import store
from tests.commands import END_SECONDS, mpirun, train_here
from tests.faults.jobs import GONE_SECONDS, config_flags, events, last_step, saved_steps

# Epochs have 20,000 steps, because the end of an epoch also saves.
LONG = ("--hidden_size", 8, "--batch_size", 4, "--num_steps", 5, "--num_epochs", 200, "--noeval")


# Run a command line on two ranks like the scripts in run_scripts/.
RUN_JOB = [
    "bash", "-euc",
    'source run_scripts/env.sh; source run_scripts/mpirun_job.sh; run_job "$@"',
    "job", *mpirun(2),
]  # fmt: skip


def check_stopped(job, code, name, timeout=GONE_SECONDS, saves=1):
    returned, output = job.finish(timeout)
    assert returned == code, output
    assert output.count(f"stopped by {name} after step") == 1
    # The line is also the last line, after the lines of mpirun.
    assert f"stopped by {name} after step" in job.output.splitlines()[-1]
    assert output.count("lm: stopping after this step and saving") <= 1
    assert f"--resume --output_dir {job.output_dir}" in output
    steps = saved_steps(job.output_dir)
    assert len(steps) == saves and steps[-1] == last_step(job.output_dir)
    assert store.find_newest(str(job.output_dir))


@pytest.mark.parametrize(
    "name, targets",
    [
        ("SIGINT", [1]),
        pytest.param("SIGINT", [0, 1], marks=pytest.mark.soak),
        pytest.param("SIGTERM", [0], marks=pytest.mark.soak),
    ],
)
def test_sigusr1_saves_and_a_signal_to_ranks_stops_all_at_the_same_step(
    start, tmp_path, name, targets
):
    job = start(tmp_path, *LONG, num_ranks=2, forked=True)
    job.wait_for_step(20)
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for(lambda: saved_steps(tmp_path))
    job.wait_for_step(last_step(tmp_path) + 20)
    ranks = job.ranks()
    for rank in targets:
        os.kill(ranks[rank], getattr(signal, name))
    check_stopped(job, 128 + getattr(signal, name), name, saves=2)


@pytest.mark.soak
def test_sigterm_to_mpirun_leaves_time_to_save(start, tmp_path):
    job = start(tmp_path, *LONG, num_ranks=2, env={END_SECONDS: "2"})
    job.wait_for_step(20)
    job.process.terminate()
    returned, output = job.ends()
    # After SIGTERM, mpirun exits with 1, regardless of the exit codes of the ranks.
    assert returned == 1 and "stopped by SIGTERM after step" in output
    assert saved_steps(tmp_path)[-1] == last_step(tmp_path)


@pytest.mark.parametrize(
    "flags, seconds",
    [
        ((), 2),
        pytest.param(
            ("--config", "config_transformer", "--corpus", "embedded", "--hidden_size", 512,
             "--batch_size", 40, "--num_steps", 70, "--nocheck_network"),
            0, marks=pytest.mark.soak,
        ),
    ],
)  # fmt: skip
def test_a_stop_signal_waits_for_a_long_first_step(start, tmp_path, flags, seconds):
    fault = f"slow_first_step:{seconds}"
    job = start(tmp_path, *LONG, *flags, launcher=RUN_JOB, fault=fault, forked=True)
    job.wait_for(lambda: events(tmp_path, "begun"))
    job.process.send_signal(signal.SIGINT)
    check_stopped(job, 128 + signal.SIGINT, "SIGTERM", timeout=120)


@pytest.mark.parametrize("launcher", [None, RUN_JOB], ids=["process", "run script"])
def test_a_stop_signal_during_the_preparation_ends_the_job(start, tmp_path, launcher):
    flags, forked = ("--hidden_size", 8, "--num_layers", 100), launcher is not None
    job = start(tmp_path / "run", *flags, launcher=launcher, forked=forked)
    job.wait_for((tmp_path / "run").exists)  # the network is built next
    ranks = job.ranks()
    job.process.send_signal(signal.SIGINT)
    job.wait_for(lambda: not set(job.processes()) & set(ranks), timeout=2, may_end=True)
    code, output = job.ends()
    assert code == 128 + signal.SIGINT and "Traceback" not in output
    assert job.output.splitlines()[-1].endswith(f"stopped by SIG{'TERM' if launcher else 'INT'}")
    assert not (tmp_path / "run").exists()


def test_a_stop_signal_waits_for_copies_that_take_long(start, tmp_path):
    flags = (*LONG, "--checkpoint_every_steps", 20, "--keep_checkpoints", 1)
    job = start(tmp_path, *flags, num_ranks=2, fault="slow_copy:3", forked=True)
    job.wait_for_step(20)  # the signal arrives during the save of this step
    job.process.send_signal(signal.SIGUSR2)
    check_stopped(job, 128 + signal.SIGTERM, "SIGTERM", timeout=60)


def test_a_closed_terminal_stops_the_job_of_a_run_script(start, tmp_path):
    def own_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the kernel sends SIGHUP to this session
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests

    ours, its = pty.openpty()
    job = start(
        tmp_path, *LONG, launcher=RUN_JOB, start_new_session=True, preexec_fn=own_terminal,
        stdin=its, stdout=its, stderr=its, forked=True,
    )  # fmt: skip
    os.close(its)
    job.wait_for_step(20)
    os.close(ours)
    assert job.finish()[0] == 128 + signal.SIGTERM
    assert saved_steps(tmp_path) == [last_step(tmp_path)]


@pytest.mark.parametrize(
    "shared", [("--distributed_eval",), pytest.param((), marks=pytest.mark.soak)]
)
def test_sigterm_during_an_evaluation_ends_it(start, tmp_path, corpora, shared):
    flags = ("--hidden_size", 8, "--max_steps", 30, *shared)
    job = start(tmp_path, *flags, num_ranks=2, fault="slow_evaluation:0.2", forked=True)
    job.wait_for(lambda: saved_steps(tmp_path))  # the evaluation comes next
    os.kill(job.ranks()[1], signal.SIGTERM)
    check_stopped(job, 128 + signal.SIGTERM, "SIGTERM")
    assert events(tmp_path, "epoch") == []
    train_here(tmp_path, *config_flags(corpora), *flags, "--resume")
    assert len(events(tmp_path, "epoch")) == 1 and events(tmp_path, "test")


@pytest.mark.soak
def test_sigterm_during_a_save_waits_for_the_save(start, tmp_path):
    flags = (*LONG, "--checkpoint_every_steps", 20)
    job = start(tmp_path, *flags, fault="slow_disk:1")
    job.wait_for(lambda: (tmp_path / "checkpoints" / "tmp-00000020").exists())
    job.process.terminate()
    returned, _ = job.ends()
    assert returned == 128 + signal.SIGTERM
    assert saved_steps(tmp_path) == [20, last_step(tmp_path)]
    assert store.find_newest(str(tmp_path)).path == store.list_checkpoints(str(tmp_path))[-1]


@pytest.mark.parametrize(
    "launcher", [None, pytest.param(RUN_JOB, marks=pytest.mark.soak)], ids=["process", "run script"]
)
def test_a_second_sigint_ends_the_job_immediately(start, tmp_path, launcher):
    forked = launcher is not None
    job = start(tmp_path, *LONG, launcher=launcher, fault="slow_disk:600", forked=forked)
    job.wait_for_step(5)
    job.process.send_signal(signal.SIGINT)
    job.wait_for(lambda: list(tmp_path.glob("checkpoints/tmp-*")))
    job.process.send_signal(signal.SIGINT)
    returned, output = job.ends()
    assert returned == 128 + signal.SIGINT
    assert launcher or "interrupted twice" in output
