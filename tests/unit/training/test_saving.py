"""Saves of a running job, and its way out."""

import threading

from lm.checkpoint import choice
from lm.checkpoint import format as checkpoint
from lm.checkpoint.writer import Saver
from lm.distributed.communicator import OneProcess
from lm.training.saving import Safekeeping


def test_a_failed_run_waits_for_its_save_with_signs_of_life(monkeypatch):
    phases, end = [], threading.Event()
    monkeypatch.setattr(checkpoint, "save", lambda *_: end.wait(30))
    monkeypatch.setattr(choice, "prune", lambda *_: None)
    saver = Saver("run", keep=1)
    saver.start({}, None)

    def beat(phase):
        phases.append(phase)
        if len(phases) == 3:
            end.set()

    Safekeeping(saver, None, OneProcess(), None, beat).wait()
    assert not saver.is_busy and set(phases) == {"the writing of a checkpoint"}
