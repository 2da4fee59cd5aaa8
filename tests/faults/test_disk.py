"""Full, slow or missing disks, clock changes and a missing /tmp never lose saved data."""

import contextlib
import os
import shutil
import signal
import subprocess
import time

import pytest

from lm.checkpoint import store
from lm.errors import RunError
from lm.training.loop import Loop
from tests.commands import train_here
from tests.faults.jobs import config_flags, events, last_step, run, saved_steps
from tests.limits import file_size_limit

FLAGS = ("--hidden_size", 64, "--noeval", "--checkpoint_every_steps", 30)


def test_no_space_for_a_checkpoint(tmp_path, corpora, caplog):
    flags = (*config_flags(corpora), *FLAGS, "--log_every_steps", 1)
    train_here(tmp_path, *flags, "--max_steps", 40)
    assert saved_steps(tmp_path) == [30, 40]
    flags += ("--max_steps", 200, "--resume")
    # A checkpoint needs 390 KB. The failure of the last save is an error.
    with file_size_limit(200_000), pytest.raises(RunError, match="cannot write the checkpoint"):
        train_here(tmp_path, *flags)
    # Training continued with only one warning, although later saves failed too.
    assert last_step(tmp_path) == 200
    assert caplog.text.count("File too large; training continues without new checkpoints\n") == 1
    assert saved_steps(tmp_path) == [30, 40]
    assert store.find_newest(str(tmp_path)).path.endswith("40")
    train_here(tmp_path, *flags)  # resumes now that there is space
    assert saved_steps(tmp_path)[-1] == 200


def test_a_failed_save_after_a_stop_signal_is_an_error(tmp_path, corpora, monkeypatch):
    take_step = Loop.take_step

    def stop_on_a_full_disk(loop, learning_rate):
        if loop.progress.step == 5:
            stack.enter_context(file_size_limit(200_000))
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(loop, learning_rate)

    monkeypatch.setattr(Loop, "take_step", stop_on_a_full_disk)
    with contextlib.ExitStack() as stack:
        with pytest.raises(RunError, match="cannot write the checkpoint"):
            train_here(tmp_path, *config_flags(corpora), *FLAGS, "--max_steps", 100)
    assert saved_steps(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system with space for two and a half checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1000k", "tmpfs", disk]
    if os.geteuid() or subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small file system")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_disk_causes_one_warning_per_file(start, small_disk):
    output_dir = small_disk / "run"
    job = start(output_dir, *FLAGS, "--max_steps", 300, forked=True)
    job.wait_for(lambda: len(saved_steps(output_dir)) == 2)
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1024))
    code, output = job.finish()
    assert code == 1 and "Traceback" not in output
    *failures, end = [line for line in output.splitlines() if "No space left on device" in line]
    assert "lm: error: cannot write the checkpoint" in end
    files = ("metrics.jsonl", "events.out.tfevents", "checkpoints/step-", "log.txt")
    counts = [sum(name in line for line in failures) for name in files]
    # The few lines of the log may fit into the last block of its file.
    assert counts in ([1, 1, 1, 0], [1, 1, 1, 1]) and len(failures) == sum(counts), output
    assert "epoch 1  step 300/1000" in output  # training reached the end
    assert store.find_newest(str(output_dir)).path.endswith("60")


def test_a_power_cut_loses_no_event_of_a_saved_step(start, tmp_path, corpora):
    flags = (*FLAGS, "--log_every_steps", 1, "--max_steps", 50)
    assert start(tmp_path, *flags, fault="power_cut:40", forked=True).finish()[0] != 0
    assert saved_steps(tmp_path) == [30]
    train_here(tmp_path, *config_flags(corpora), *flags, "--resume")
    assert [event["step"] for event in events(tmp_path, "step")] == list(range(1, 51))


@pytest.mark.soak
def test_the_output_dir_vanishes(start, tmp_path):
    output_dir = tmp_path / "run"
    job = start(output_dir, *FLAGS, "--num_epochs", 1, num_ranks=2)
    job.wait_for(lambda: saved_steps(output_dir))
    shutil.move(output_dir, tmp_path / "elsewhere")
    code, output = job.finish()
    assert code == 1 and output.count("lm: error: cannot write the checkpoint") == 1
    assert not output_dir.exists() and store.find_newest(str(tmp_path / "elsewhere"))


@pytest.mark.soak
def test_a_slow_disk_delays_no_step(start, tmp_path):
    flags = ("--hidden_size", 8, "--noeval", "--checkpoint_every_steps", 10, "--max_steps", 400)
    job = start(tmp_path, *flags, fault="slow_disk:5")
    job.wait_for(lambda: (tmp_path / "checkpoints" / "tmp-00000010").exists())
    started = time.monotonic()
    job.wait_for_step(400)
    assert time.monotonic() - started < 5  # while the first checkpoint was being written
    assert job.finish()[0] == 0
    assert saved_steps(tmp_path) == [10, 400]


@pytest.mark.soak
def test_a_jumping_clock_does_not_disturb_training_or_saving(start, tmp_path):
    flags = ("--hidden_size", 8, "--max_steps", 50, "--checkpoint_every_minutes", 0.001)
    run(start, tmp_path, *flags, fault="clock", num_ranks=2)
    assert events(tmp_path, "test") and len(saved_steps(tmp_path)) > 1
    assert saved_steps(tmp_path)[-1] == 50


@pytest.mark.soak
def test_training_works_without_a_directory_for_temporary_files(start, tmp_path):
    env = {name: "/nonexistent" for name in ("TMPDIR", "TEMP", "TMP")}
    run(start, tmp_path, "--hidden_size", 8, "--max_steps", 20, env=env)
