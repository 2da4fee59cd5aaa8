"""Run `lm.train` with one fault built in: `python -m tests.faults.inject FAULT [flags]`.

The program knows nothing of this: the fault is put around one of its functions, and a kill is a
real SIGKILL. FAULT is a function below and its arguments: `kill:1:30` kills rank 1 at step 30.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time

import numpy as np

from lm.distributed.launch import launched_rank
from lm.system import import_tensorflow
from lm.train import main

FAULTS = {}


def fault(function):
    FAULTS[function.__name__] = function
    return function


def around(owner, name, before=lambda *args: None, after=lambda *args: None):
    """Replace a function by one that calls `before` and `after` with its arguments."""
    original = getattr(owner, name)

    def replacement(*args, **kwargs):
        before(*args)
        result = original(*args, **kwargs)
        after(*args)
        return result

    setattr(owner, name, replacement)


def at_step(rank, step, action, when="before"):
    """Call action(loop) on one rank before or after it runs one step."""
    from lm.training.loop import Loop

    def act(loop, *_):
        if loop.job.comm.rank == int(rank) and loop.progress.step + 1 == int(step):
            action(loop)

    around(Loop, "_run_step", **{when: act})


def kill_self(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@fault
def kill(rank, step):
    at_step(rank, step, kill_self)


@fault
def stop(rank, step):
    at_step(rank, step, lambda loop: os.kill(os.getpid(), signal.SIGSTOP))


@fault
def power_cut(step):
    """What metrics.jsonl has had since it was last flushed to the disk is lost."""
    flushed = {}

    def note(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        flushed[path] = os.path.getsize(path)

    def cut(loop):
        loop.checkpointer.wait()
        path = os.path.realpath(os.path.join(loop.reporter.output_dir, "metrics.jsonl"))
        os.truncate(path, flushed.get(path, 0))
        kill_self()

    around(os, "fsync", before=note)
    at_step(0, step, cut)


@fault
def fail(rank, step, when):
    def action(*_):
        raise RuntimeError("the injected cause")

    at_step(rank, step, action, when)


@fault
def fail_to_prepare(rank):
    import lm.training.run

    def action(config, options, comm, *_):
        if comm.rank == int(rank):
            raise RuntimeError("the injected cause")

    around(lm.training.run, "prepare", before=action)


@fault
def nan(rank, step):
    """The recurrent state of one rank becomes NaN."""
    from lm.checkpoint import variables

    def action(loop):
        state = loop.graphs.train.window.state
        values = {name: np.full(v.shape.as_list(), np.nan, "f") for name, v in state.items()}
        variables._assign(loop.session, state, values)

    at_step(rank, step, action)


@fault
def little_memory(megabytes):
    """From the summary on, the process gets no more than so much memory."""
    import lm.training.run

    def limit(*_):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limit = used + int(megabytes) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    around(lm.training.run, "report_start", after=limit)


@fault
def flip(rank, step):
    """One bit of one weight of one rank changes."""
    from lm.checkpoint import variables

    def action(loop):
        weights = variables.read_variables(loop.session)["lstm_1/bias"]
        weights.view(np.uint32)[3] ^= 1 << 20  # a high one, so that no rounding hides it
        variables.load_variables(loop.session, {"lstm_1/bias": weights})

    at_step(rank, step, action)


@fault
def spoil(step):
    """One weight of rank 0, that of a word which need not occur, becomes NaN."""
    from lm.checkpoint import variables

    def action(loop):
        weights = variables.read_variables(loop.session)["embedding"]
        weights[-1, 0] = np.nan
        variables.load_variables(loop.session, {"embedding": weights})

    at_step(0, step, action, when="after")


@fault
def slow_evaluation(seconds):
    """Each window of an evaluation takes so long."""
    import lm.model.windows

    original = lm.model.windows.run_evaluation

    def slow(session, model, batches, at_work):
        def late():
            time.sleep(float(seconds))
            at_work()

        return original(session, model, batches, late)

    lm.model.windows.run_evaluation = slow


@fault
def stop_in_test(rank):
    """One rank is stopped in the middle of the test; each window takes 0.025 s."""
    import lm.training.loop

    slow_evaluation(0.025)

    def act(loop, split, *_):
        if split == "test" and launched_rank() == int(rank):
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGSTOP)).start()

    around(lm.training.loop.Loop, "_evaluate", before=act)


@fault
def slow_copy(seconds):
    """The weights of a checkpoint take so long to copy."""
    import lm.training.checkpointer

    original = lm.training.checkpointer.Checkpointer.save
    variables = lm.training.checkpointer.variables

    def save(*args):
        around(variables, "read_variables", before=lambda *_: time.sleep(float(seconds)))
        original(*args)

    lm.training.checkpointer.Checkpointer.save = save


@fault
def slow_disk(seconds):
    import lm.checkpoint.store

    around(lm.checkpoint.store, "_write_tensors", after=lambda *_: time.sleep(float(seconds)))


@fault
def clock():
    """The wall clock goes back by an hour whenever it is read."""
    start, reads = time.time(), []

    def jumping():
        reads.append(1)
        return start - 3600 * len(reads)

    time.time = jumping


if __name__ == "__main__":
    import_tensorflow()  # as `lm.train` does, before the faults do
    name, *arguments = sys.argv.pop(1).split(":")
    FAULTS[name](*arguments)
    main()
