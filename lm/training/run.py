"""A training run, from a config to its test."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from lm.checkpoint import variables
from lm.config import Config, RunOptions
from lm.config_file import BUILT_IN, NetworkFunctions
from lm.distributed.agreement import check_agreement, raise_on_all_ranks
from lm.distributed.communicator import Communicator
from lm.distributed.devices import session_config
from lm.distributed.supervisor import Supervisor
from lm.errors import RunError
from lm.events.reporter import Reporter
from lm.events.tracing import StepTracer
from lm.model.network import Network
from lm.model.user_errors import one_line_errors, short_message
from lm.record import from_json
from lm.system import keep_freed_memory
from lm.training.averaging import Average
from lm.training.checkpointer import BackgroundWriter, Checkpointer
from lm.training.loop import Loop
from lm.training.prepare import Prepared, facts_of, prepare
from lm.training.progress import TrainProgress
from lm.training.restore import RestoreHook, initial_arrays, initial_progress
from lm.training.step import TrainGraph, build_train_graph, graph_facts
from lm.training.summary import find_exactness, report_start
from lm.training.validation import Validation


def train(
    config: Config,
    options: RunOptions,
    comm: Communicator,
    functions: NetworkFunctions = BUILT_IN,
) -> None:
    """Train, validate after each epoch, save, and test at the end.

    To be called on all ranks. It leaves no threads, signal handlers, log files or locks behind, so
    that it can be called again.

    Args:
      config: What is trained.
      options: How and where.
      comm: The ranks, from `lm.distributed.launch.connect`.
      functions: The functions of the network.

    Raises:
      UserError: Something given cannot be used; on all ranks.
      RunError: The run has failed or was stopped by a signal; see its kinds in lm/errors.py.
    """
    keep_freed_memory()
    with contextlib.ExitStack() as stack:
        run = prepare(config, options, comm, stack, functions)
        check_agreement(comm, facts_of(run))
        _start(run, stack)


def _start(run: Prepared, stack: contextlib.ExitStack) -> None:
    comm = run.comm
    supervisor = stack.enter_context(Supervisor(comm, run.options.step_timeout_seconds))
    position = raise_on_all_ranks(comm, lambda: initial_progress(run.run_dir))
    # Rank 0 alone reads checkpoints: other hosts need not see its disk.
    position = from_json(TrainProgress, comm.gather(dataclasses.asdict(position))[0], "rank 0")
    try:
        with one_line_errors(run.functions, running=True):
            _train(run, position, supervisor, stack)
    except tf.errors.ResourceExhaustedError as error:
        raise RunError(
            f"out of memory ({short_message(error)}): reduce the model or batch_size, or use more"
            " ranks"
        ) from error
    # The supervisor is still watching: a rank that is stopped in its last step must end the job.
    comm.barrier()


def _train(
    run: Prepared,
    position: TrainProgress,
    supervisor: Supervisor,
    stack: contextlib.ExitStack,
) -> None:
    options, comm = run.options, run.comm
    with tf.Graph().as_default():
        step, average, validation = raise_on_all_ranks(comm, lambda: _build(run, supervisor))
        check_agreement(comm, graph_facts(comm, step.model))
        state = step.model.state
        arrays = raise_on_all_ranks(
            comm, lambda: _begin(run, position, state), takes_part=comm.is_rank_0
        )
        output_dir = run.run_dir.path if run.run_dir else None
        reporter = stack.enter_context(Reporter(output_dir, options.tensorboard))
        writer = _writer(run, reporter, stack)
        report_start(run, position, reporter, find_exactness(run, position))
        # Not MonitoredTrainingSession: it recovers from errors by making a new session, on one
        # rank alone, which would then wait for ever for the others' broadcast. And closing: as a
        # context manager it takes OutOfRangeError for the end of the data, and the run for done.
        monitored = tf.train.SingularMonitoredSession(
            hooks=[RestoreHook(arrays), *comm.hooks()], config=session_config(run.device)
        )
        with contextlib.closing(monitored):
            session = monitored.raw_session()
            if position.step:
                rows = run.batches.rows.slice
                variables.load_state(session, state, arrays, rows, comm.concat)
            del arrays  # as large as a checkpoint
            Loop(
                config=run.config,
                options=options,
                comm=comm,
                batches=run.batches,
                session=session,
                step=step,
                average=average,
                tracer=StepTracer(session, run.profile_steps, reporter.output_dir),
                position=position,
                checkpointer=Checkpointer(
                    writer, run.record, options, comm, session, state, supervisor
                ),
                validation=validation,
                reporter=reporter,
                supervisor=supervisor,
                known_perplexity=run.corpus.known_perplexity,
            ).run()


def _build(
    run: Prepared, supervisor: Supervisor
) -> tuple[TrainGraph, Optional[Average], Validation]:
    config, options, comm = run.config, run.options, run.comm
    with one_line_errors(run.functions):
        network = Network(config, len(run.corpus.vocabulary), run.functions)
        step = build_train_graph(network, comm, run.batches.rows)
        average = Average() if config.asgd_trigger_epochs else None
        shared = options.distributed_eval
        validation = Validation(network, run.corpus, comm, average, shared, supervisor)
    return step, average, validation


def _begin(
    run: Prepared, position: TrainProgress, state: Mapping[str, tf.Variable]
) -> Optional[dict[str, np.ndarray]]:
    """Return what the variables start with, and take the place of what was there; for rank 0."""
    arrays = initial_arrays(run.run_dir, run.options, run.corpus.vocabulary, state)
    # Last of all: a run that cannot be built, or goes on from what does not fit, changes nothing.
    run.run_dir.drop_events_after(position.step, position.epochs_done)
    return arrays


def _writer(
    run: Prepared, reporter: Reporter, stack: contextlib.ExitStack
) -> BackgroundWriter | None:
    if run.run_dir is None:
        return None
    writer = BackgroundWriter(run.run_dir.path, run.options.keep_checkpoints, reporter.sync)
    # However the run ends, do not release the directory while it is written to.
    stack.callback(writer.wait)
    return writer
