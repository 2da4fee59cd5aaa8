"""Saves of a running job, and its way out."""

import errno
import os
import threading
import types

from lm.checkpoint import choice
from lm.checkpoint import format as checkpoint
from lm.checkpoint.writer import Saver
from lm.distributed.communicator import OneProcess
from lm.distributed.supervisor import Waiting
from lm.training.saving import Safekeeping


def test_a_save_is_due_after_steps_or_minutes():
    assert [step for step in range(1, 9) if Saver("run", 1, every_steps=4).is_due(step)] == [4, 8]
    assert Saver("run", 1, every_minutes=1e-9).is_due(1)
    assert not Saver("run", 1, every_minutes=60).is_due(1)


def test_old_checkpoints_that_cannot_be_removed_are_no_failed_save(monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint, "save", lambda *_: None)
    monkeypatch.setattr(choice, "prune", fail)
    saver = Saver("run", keep=1)
    saver.start({}, None)
    saver.wait()
    assert saver.failure is None
    assert "old checkpoints are not removed: [Errno 5] Input/output error" in caplog.text


def test_a_failed_run_waits_for_its_save_and_gets_on_only_when_that_is_done(monkeypatch):
    beats, end = [], threading.Event()
    monkeypatch.setattr(checkpoint, "save", lambda *_: end.wait(30))
    monkeypatch.setattr(choice, "prune", lambda *_: None)
    saver = Saver("run", keep=1)
    saver.start({}, None)

    def beat(phase, stoppable=False, alone=False, progress=True):
        assert phase == "the writing of a checkpoint"
        beats.append((alone, progress))
        if len(beats) == 5:
            end.set()

    watched = types.SimpleNamespace(enter=beat, signals=types.SimpleNamespace(stop=0))
    watched.waiting = lambda phase, stoppable: Waiting(OneProcess(), watched, phase, stoppable)
    Safekeeping(saver, None, OneProcess(), None, watched).wait()
    assert not saver.is_busy
    assert beats[0] == (False, True) and beats[-1] == (False, True)  # as it begins, and ends
    assert (True, False) in beats and (True, True) not in beats
