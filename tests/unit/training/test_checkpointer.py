"""The times at which a job saves, and waiting for a save."""

import errno
import os
import threading

import pytest

from lm.checkpoint import background, store
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
    def fail(*_):
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

    monkeypatch.setattr(background, "prune", fail)
    writer = BackgroundWriter(str(tmp_path), keep=1)
    writer.start([whole(ARRAYS)], manifest(1))
    writer.wait()
    assert writer.failure is None
    assert "old checkpoints are not removed: [Errno 5] Input/output error" in caplog.text


def test_old_checkpoints_are_verified_once(tmp_path, caplog):
    save(tmp_path, 1)
    truncate(save(tmp_path, 2))
    writer = BackgroundWriter(str(tmp_path), keep=2)
    for step in (3, 4, 5):
        writer.start([whole(ARRAYS)], manifest(step))
        writer.wait()
    assert steps(tmp_path) == [4, 5]
    assert caplog.text.count("skipping a corrupt checkpoint") == 1


def test_a_failed_run_waits_for_its_save_without_reporting_progress(monkeypatch, checkpointer):
    polls, end = [], threading.Event()
    monkeypatch.setattr(store, "save", lambda *_: end.wait(30))
    monkeypatch.setattr(background, "prune", lambda *_: None)
    writer = BackgroundWriter("run", keep=1)
    writer.start({}, None)

    def poll(self, progress=True):
        polls.append(progress)
        if len(polls) == 5:
            end.set()

    monkeypatch.setattr(Waiting, "poll", poll)
    checkpointer(writer).wait()
    assert not writer.is_busy and set(polls) == {False}
