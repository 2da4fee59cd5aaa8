"""Run `lm.train` with one injected fault. Usage: python -m tests.faults.inject FAULT [flags]

The fault wraps a function of the program, which has no test code itself. Kills are real SIGKILLs.
The environment variable INJECT_INTO selects a different command.
FAULT is the name of a function below with its arguments: `kill:1:30` kills rank 1 at step 30.
"""

import os
import resource
import runpy
import signal
import sys
import threading
import time

from lm.system import keep_freed_memory
from lm.tensorflow_import import import_tensorflow

keep_freed_memory()  # `lm.train` also calls this before NumPy starts threads

import numpy as np  # noqa: E402

from lm.cli import program  # noqa: E402
from lm.distributed.launch import launched_rank  # noqa: E402
from lm.train import main  # noqa: E402


def around(owner, name, before=lambda *args: None, after=lambda *args: None):
    """Wrap a function with calls of `before` and `after` that get the same arguments."""
    original = getattr(owner, name)

    def replacement(*args, **kwargs):
        before(*args)
        result = original(*args, **kwargs)
        after(*args)
        return result

    setattr(owner, name, replacement)


def at_step(rank, step, action, when="before"):
    """Call action(loop) on one rank before or after a step."""
    from lm.training.loop import Loop

    def act(loop, *_):
        if loop.job.comm.rank == int(rank) and loop.progress.step + 1 == int(step):
            action(loop)

    around(Loop, "take_step", **{when: act})


def kill_self(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def kill(rank, step):
    """Kill a rank after its last checkpoint is complete, which may take longer than 20 steps."""

    def end(loop):
        if writer := loop.checkpointer._writer:  # on rank 0
            writer.wait()
        kill_self()

    at_step(rank, step, end)


def stop_at_start(rank, limit):
    """Stop a rank before the ranks are connected, for which they have a time limit in seconds."""
    program._START_SECONDS = float(limit)
    if launched_rank() == int(rank):
        os.kill(os.getpid(), signal.SIGSTOP)


def stop(rank, step):
    at_step(rank, step, lambda loop: os.kill(os.getpid(), signal.SIGSTOP))


def power_cut(step):
    """Discard all changes to metrics.jsonl since its last fsync, and kill the process."""
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


def fail(rank, step, when):
    def action(*_):
        raise RuntimeError("the injected cause")

    at_step(rank, step, action, when)


def fail_to_prepare(rank):
    import lm.training.run

    def action(config, options, comm, *_):
        if comm.rank == int(rank):
            raise RuntimeError("the injected cause")

    around(lm.training.run, "prepare", before=action)


def nan(rank, step):
    """Set the recurrent state of one rank to NaN."""

    def action(loop):
        for array in loop.graphs.runner.state.values():
            array[:] = np.nan

    at_step(rank, step, action)


def little_memory(megabytes):
    """Limit the memory that the process can allocate after the startup summary."""
    import lm.training.run

    def limit(*_):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limit = used + int(megabytes) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    around(lm.training.run, "report_start", after=limit)


def change(session, name, edit):
    """Edit a variable with a function of its array. A finalized graph cannot get new operations."""
    (variable,) = [v for v in session.graph.get_collection("variables") if v.op.name == name]
    array = np.array(session.run(variable))
    edit(array)
    session.run(variable.initializer, {variable.initializer.inputs[1]: array})


def flip(rank, step):
    """Flip one bit in one weight of one rank."""

    def edit(bias):
        bias.view(np.uint32)[3] ^= 1 << 20  # a high bit, because rounding could hide a low bit

    at_step(rank, step, lambda loop: change(loop.session, "lstm_1/bias", edit))


def spoil(step):
    """Set a weight of both ranks to NaN. Its word may not occur, so the loss may stay finite."""

    def edit(embedding):
        embedding[-1, 0] = np.nan

    for rank in range(2):
        at_step(rank, step, lambda loop: change(loop.session, "embedding", edit), when="after")


def slow_first_step(seconds):
    """Write the event "begun", then delay the first step."""

    def act(loop):
        loop.reporter.event("begun")
        time.sleep(float(seconds))

    at_step(0, 1, act)


def stop_in_evaluation(rank):
    """Stop one rank when it begins to evaluate."""
    import lm.model.evaluator

    def act(*_):
        if launched_rank() == int(rank):
            os.kill(os.getpid(), signal.SIGSTOP)

    around(lm.model.evaluator, "run_evaluation", before=act)


def slow_evaluation(seconds):
    """Delay each window of an evaluation."""
    import lm.model.evaluator

    original = lm.model.evaluator.run_evaluation

    def slow(session, runner, batches, at_work):
        def late():
            time.sleep(float(seconds))
            at_work()

        return original(session, runner, batches, late)

    lm.model.evaluator.run_evaluation = slow


def stop_in_test(rank):
    """Stop one rank during the evaluation of test. Each window takes 0.0125 s."""
    from lm.model.evaluator import Evaluator

    slow_evaluation(0.0125)

    def act(evaluator, session, split, *_):
        if split == "test" and launched_rank() == int(rank):
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGSTOP)).start()

    around(Evaluator, "run", before=act)


def new_checkpoint(hidden, final):
    """Rename a checkpoint after rank 0, and before the other ranks, open the run."""
    import lm.inference.trained_run

    def wait(*_):
        while launched_rank() and not os.path.exists(final):
            time.sleep(0.01)

    def rename(*_):
        if launched_rank() == 0:
            os.rename(hidden, final)

    around(lm.inference.trained_run, "open_run", before=wait, after=rename)


def slow_copy(seconds):
    """Delay copying the weights of the first checkpoint, which only rank 0 copies."""
    import lm.training.checkpointer

    checkpointer = lm.training.checkpointer.Checkpointer
    save, reader = checkpointer._save, lm.training.checkpointer.transfer.VariableReader
    groups = reader.groups

    def slow_save(*args, **kwargs):
        around(reader, "groups", before=lambda *_: time.sleep(float(seconds)))
        save(*args, **kwargs)
        checkpointer._save, reader.groups = save, groups

    checkpointer._save = slow_save


def slow_load(seconds):
    import lm.training.restore

    before = lambda *_: time.sleep(float(seconds))  # noqa: E731
    around(lm.training.restore.VariableLoader, "load", before=before)


def slow_disk(seconds):
    import lm.checkpoint.store

    around(lm.checkpoint.store, "write_tensors", after=lambda *_: time.sleep(float(seconds)))


def clock():
    """Set the wall clock back by an hour at each read."""
    start, reads = time.time(), []

    def jumping():
        reads.append(1)
        return start - 3600 * len(reads)

    time.time = jumping


if __name__ == "__main__":
    import_tensorflow()  # before the faults import it, with the settings of `lm.train`
    name, *arguments = sys.argv.pop(1).split(":")
    globals()[name](*arguments)
    if command := os.environ.get("INJECT_INTO"):
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    main()
