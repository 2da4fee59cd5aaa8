"""A full, slow or vanished disk, a jumping clock, no /tmp: no crash, and nothing saved is lost."""

import resource
import shutil
import time

import pytest

from lm import checkpoint
from tests.faults.jobs import events, last_step, run, saved_steps

FLAGS = ("--hidden_size", 64, "--noeval", "--checkpoint_every_steps", 30)


def limit_files():
    """Fails writes beyond 200 KB of a file, as a full disk does: a checkpoint has 390 KB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


def test_no_space_for_a_checkpoint(start, tmp_path):
    run(start, tmp_path, *FLAGS, "--max_steps", 40)
    assert saved_steps(tmp_path) == [30, 40]
    flags = (*FLAGS, "--max_steps", 200, "--resume")
    code, output = start(tmp_path, *flags, preexec_fn=limit_files).finish()
    # It went on without, and tried again; that the last one failed is an error.
    assert last_step(tmp_path) == 200
    assert output.count("; training goes on") > 1
    assert code == 1 and output.count("lm: error: cannot write the checkpoint") == 1
    assert saved_steps(tmp_path) == [30, 40]
    assert checkpoint.newest(str(tmp_path)).endswith("40")
    run(start, tmp_path, *flags)  # with space, it goes on from there
    assert saved_steps(tmp_path)[-1] == 200


@pytest.mark.soak
def test_the_output_dir_vanishes(start, tmp_path):
    output_dir = tmp_path / "run"
    job = start(output_dir, *FLAGS, "--num_epochs", 1, num_ranks=2)
    job.wait_for(lambda: saved_steps(output_dir))
    shutil.move(output_dir, tmp_path / "elsewhere")
    code, output = job.finish()
    assert code == 1 and output.count("lm: error: cannot write the checkpoint") == 1
    assert not output_dir.exists() and checkpoint.newest(str(tmp_path / "elsewhere"))


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
def test_the_clock_jumps(start, tmp_path):
    flags = ("--hidden_size", 8, "--max_steps", 50, "--checkpoint_every_minutes", 0.001)
    run(start, tmp_path, *flags, fault="clock", num_ranks=2)
    assert events(tmp_path, "test") and saved_steps(tmp_path)[-1] == 50


@pytest.mark.soak
def test_without_a_directory_for_temporary_files(start, tmp_path):
    env = {name: "/nonexistent" for name in ("TMPDIR", "TEMP", "TMP")}
    run(start, tmp_path, "--hidden_size", 8, "--max_steps", 20, env=env)
