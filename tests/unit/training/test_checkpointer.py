"""The times at which a job saves, and waiting for a save."""

import errno
import os
import queue
import time

import pytest

from lm.checkpoint import background, pruning, store
from lm.checkpoint.background import BackgroundWriter
from lm.checkpoint.tensors import whole
from lm.config import RunOptions
from lm.distributed.communicator import Communicator
from lm.distributed.supervisor import Supervisor, Waiting
from lm.training.checkpointer import Checkpointer
from tests.unit.checkpoint.saved import ARRAYS, manifest, save, steps, truncate


@pytest.fixture
def checkpointer():
    """Create checkpointers of one process, by default with an idle writer."""
    with Supervisor(Communicator(), 0) as supervisor:

        def make(writer=None, **options):
            writer = writer or BackgroundWriter("run", keep=1)
            options = RunOptions(**options)
            return Checkpointer(writer, None, options, Communicator(), None, None, {}, supervisor)

        yield make


def test_a_save_is_due_after_steps_or_minutes(checkpointer):
    every_four = [checkpointer(checkpoint_every_steps=4).is_due(step) for step in range(1, 9)]
    assert every_four == [False, False, False, True] * 2
    assert checkpointer(checkpoint_every_minutes=1e-9).is_due(1)
    assert not checkpointer(checkpoint_every_minutes=60).is_due(1)


@pytest.mark.parametrize("seconds, num_warnings", [(3600.0, 1), (0.0, 2)])
def test_the_warning_about_a_full_disk_is_repeated(
    tmp_path, monkeypatch, caplog, seconds, num_warnings
):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "save", fail)
    monkeypatch.setattr(background, "_WARN_SECONDS", seconds)
    writer = BackgroundWriter(str(tmp_path), keep=1)
    for step in (1, 2):
        writer.start([whole(ARRAYS)], manifest(step))
        writer.wait()
    assert caplog.text.count("training continues without new checkpoints") == num_warnings


def test_old_checkpoints_that_cannot_be_removed_do_not_fail_a_save(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store, "remove", fail)
    writer = BackgroundWriter(str(tmp_path), keep=1)
    for step in (1, 2):
        writer.start([whole(ARRAYS)], manifest(step))
        writer.wait()
    assert writer.failure is None
    assert "old checkpoints are not removed: [Errno 5] Input/output error" in caplog.text


def test_only_checkpoints_that_decide_what_to_remove_are_verified(tmp_path, monkeypatch):
    for step, perplexity in enumerate([9.0, 7.0, 8.0, 6.0, 6.5, 6.6], 1):
        save(tmp_path, step, perplexity)
    verified, verify = [], pruning.verify
    monkeypatch.setattr(pruning, "verify", lambda *of: verified.append(of[0]) or verify(*of))
    resumed = store.find_newest(str(tmp_path))
    writer = BackgroundWriter(str(tmp_path), keep=3, resumed=resumed)
    for step in (7, 8):
        writer.start([whole(ARRAYS)], manifest(step, 7.5))
        writer.wait()
    assert steps(tmp_path) == [4, 6, 7, 8]  # 4 is the best, and 6 was resumed
    assert [path[-1] for path in verified] == ["5", "4"]


def test_old_checkpoints_are_verified_once(tmp_path, caplog):
    save(tmp_path, 1)
    truncate(save(tmp_path, 2))
    writer = BackgroundWriter(str(tmp_path), keep=2)
    for step in (3, 4, 5):
        writer.start([whole(ARRAYS)], manifest(step))
        writer.wait()
    assert steps(tmp_path) == [4, 5]
    assert caplog.text.count("skipping a corrupt checkpoint") == 1
    assert len(writer._pruner._verified) == 2  # a long run does not collect manifests


def test_a_slow_save_is_progress_but_a_hanging_save_is_not(monkeypatch, checkpointer):
    polls, answers, steps = [], [], queue.SimpleQueue()

    def save_slowly(*_, after_file, **__):
        while steps.get(timeout=30):
            after_file()
            answers.append(True)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def poll(self, progress=True):
        polls.append(progress)
        if len(polls) in (2, 3):
            steps.put(True)
            while len(answers) < len(polls) - 1:
                time.sleep(0.01)
        if len(polls) == 6:
            steps.put(False)

    monkeypatch.setattr(store, "save", save_slowly)
    monkeypatch.setattr(Waiting, "poll", poll)
    writer = BackgroundWriter("run", keep=1)
    writer.start([], manifest(1))
    assert "Input/output error" in checkpointer(writer).wait()
    assert not writer.is_busy and polls == [True, False, True, True, False, False]
