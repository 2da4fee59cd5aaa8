"""A training run, from a config to its test."""

import contextlib
import dataclasses
import os
import sys
from typing import Any

import tensorflow.compat.v1 as tf

from lm.checkpoint import transfer
from lm.checkpoint.progress import TrainProgress
from lm.config import Config, RunOptions
from lm.distributed.agreement import check_agreement, on_all_ranks
from lm.distributed.communicator import Communicator
from lm.distributed.devices import session_config
from lm.distributed.supervisor import Supervisor
from lm.errors import RunError, UserError, short_message
from lm.events.logs import LogFiles
from lm.events.read import drop_events_after
from lm.events.reporter import Heartbeat, Reporter
from lm.functions import BUILT_IN, NetworkFunctions
from lm.model import decoding
from lm.model.network import Network
from lm.model.sampler import Sampler
from lm.model.windows import Evaluator, WindowRunner
from lm.record import LOG_FILE, from_json
from lm.system import keep_freed_memory
from lm.training.averaging import Average
from lm.training.checkpointer import BackgroundWriter, Checkpointer
from lm.training.exactness import find_exactness
from lm.training.initialize import initial_values
from lm.training.loop import Graphs, Loop
from lm.training.prepare import Job, prepare
from lm.training.restore import BroadcastHook, InitialValues, values_to_resume
from lm.training.step import build_train_graph, divide_rows, graph_facts
from lm.training.summary import report_start

_MANY_WORDS = 50_000


def train(
    config: Config,
    options: RunOptions,
    comm: Communicator,
    functions: NetworkFunctions = BUILT_IN,
    supervisor: Supervisor | None = None,
) -> dict[str, Any]:
    """Train, validate after each epoch, save, and test at the end. Return the final results.

    All ranks call this function. It leaves no threads, signal handlers, log files or locks behind,
    so it can be called again. `lm.distributed.launch.connect` returns the communicator. Without a
    supervisor, the run creates one.

    Raises:
      UserError: If an argument is invalid; on all ranks.
      RunError: If the run fails or a signal stops it; see lm/errors.py for the subclasses.
    """
    keep_freed_memory()
    with contextlib.ExitStack() as stack:
        supervisor = supervisor or stack.enter_context(Supervisor(comm, 0))
        supervisor.timeout = options.step_timeout_seconds
        if comm.is_rank_0 and not sys.stderr.isatty():
            stack.enter_context(contextlib.closing(Heartbeat(lambda: supervisor.activity)))
        job = prepare(config, options, comm, stack, functions, supervisor)
        progress = _initial_progress(job)
        try:
            with functions.one_line_errors(running=True), tf.Graph().as_default():
                results = _train(job, progress, supervisor, stack)
        except (MemoryError, tf.errors.ResourceExhaustedError) as error:
            raise RunError(
                f"out of memory ({short_message(error)}): {_less_memory(job)}"
            ) from error
        with supervisor.exchange("the end of the run"):
            comm.barrier()
    return {"output_dir": job.output_dir, **results}


def _initial_progress(job: Job) -> TrainProgress:
    checkpoint = job.run_dir and job.run_dir.checkpoint
    progress = checkpoint.manifest.progress if checkpoint else TrainProgress()
    if job.config.ema_decay:
        progress.averages_from = 0
    # Only rank 0 reads checkpoints: the other hosts may not see its disk.
    return from_json(TrainProgress, job.comm.gather(dataclasses.asdict(progress))[0], "rank 0")


def _initial_values(job: Job, network: Network) -> InitialValues | None:
    """Return the values to load on rank 0, which reads checkpoints for all ranks."""
    if job.run_dir and job.run_dir.checkpoint:
        return values_to_resume(job.run_dir.checkpoint, network.state_shapes)
    if job.source:
        return initial_values(job.source, job.options, job.corpus.tokenizer, job.functions)
    return None


def _less_memory(job: Job) -> str:
    num_words = len(job.corpus.tokenizer)
    if num_words < _MANY_WORDS or job.config.cutoffs:
        return "reduce the model or batch_size, or use more ranks"
    return (
        f"the vocabulary has {num_words:,} words: limit it with --vocab_size or --min_count, or use"
        " --adaptive_softmax_cutoffs"
    )


def _train(
    job: Job, progress: TrainProgress, supervisor: Supervisor, stack: contextlib.ExitStack
) -> dict[str, Any]:
    comm = job.comm
    with supervisor.preparing("the building of the graph"), on_all_ranks(comm):
        graphs = _build_graphs(job)
    stack.enter_context(supervisor.exchange("the start of the training"))
    check_agreement(comm, graph_facts())
    with on_all_ranks(comm):
        values = _initial_values(job, graphs.network)
    reporter = _open_files(job, progress, stack)
    supervisor.on_failure = lambda reason: reporter.report_end(RunError(reason))
    writer = None
    if job.run_dir:
        writer = BackgroundWriter(job.output_dir, job.options.keep_checkpoints, reporter.sync)
        # Do not release the directory during a write, even after an error.
        stack.callback(writer.wait)
    exactness = find_exactness(job, graphs.network, progress)
    progress.exact_with = exactness.exact_with
    report_start(job, exactness, progress.step, reporter)
    # MonitoredTrainingSession would create a new session after an error. This rank would then wait
    # forever for the broadcast of the other ranks.
    hook = BroadcastHook(comm, values, graphs.broadcast)
    monitored = tf.train.SingularMonitoredSession([hook], config=session_config(job.device))
    # Do not use `with monitored`, which would interpret OutOfRangeError as the end of the data.
    with contextlib.closing(monitored):
        session = monitored.raw_session()
        if progress.step:
            saved, rows = values and values.state, job.batches.rows.slice
            graphs.runner.state = transfer.local_state(
                graphs.runner.state, saved, rows, comm.concat
            )
        checkpointer = Checkpointer(
            writer, job.record, job.options, comm, session, graphs.reader, graphs.runner, supervisor
        )
        loop = Loop(job, graphs, session, supervisor, checkpointer, reporter, progress)
        loop.run()
        return loop.results


def _build_graphs(job: Job) -> Graphs:
    config, comm, rows, functions = job.config, job.comm, job.batches.rows, job.functions
    division = divide_rows(
        rows, job.device, functions.is_built_in, job.options.micro_batches_at_once
    )
    with functions.one_line_errors():
        words = job.corpus.tokenizer.tokens
        network = Network(config, len(words), functions, words)
        _check_window_order(network)
        train_graph = build_train_graph(network, comm, division)
        has_average = config.asgd_trigger_epochs or config.ema_decay
        average = Average(config.ema_decay) if has_average else None
        eos_id, shared = job.corpus.tokenizer.eos_id, job.options.distributed_eval
        num_threads = division.num_threads
        evaluator = Evaluator(network, eos_id, comm.rank, comm.size, shared, num_threads)
        sampler = Sampler(network, eos_id) if job.options.sample_every_steps else None
        if network.has_losses and network.predicts:
            decoding.create_variables(network)
    runner = WindowRunner(train_graph.window, rows, num_threads)
    # Broadcast only global variables. The recurrent state is local and differs between ranks.
    broadcast = comm.broadcast_variables()
    reader = transfer.VariableReader()
    loader = transfer.VariableLoader() if job.options.test_on == "best" else None
    return Graphs(
        network, train_graph, runner, evaluator, average, sampler, broadcast, reader, loader
    )


def _check_window_order(network: Network) -> None:
    if network.config.window_order == "shuffled" and network.state_shapes:
        raise UserError(
            "window_order shuffled needs a network without recurrent state, but"
            f" {network.where} carries state from window to window: use window_order sequential"
        )


def _open_files(job: Job, progress: TrainProgress, stack: contextlib.ExitStack) -> Reporter:
    """Open the event and log files, and write the record and the tokenizer.

    Events that the run will repeat are removed. Call this function after everything that may fail,
    because a run that cannot start must not change its files.
    """
    options, run_dir, output_dir = job.options, job.run_dir, job.output_dir
    paths = [os.path.join(output_dir, LOG_FILE)]
    if options.log_path:
        paths.append(options.log_path)
    with on_all_ranks(job.comm):
        if run_dir:
            step, epochs = progress.step, progress.epochs_done
            drop_events_after(output_dir, step, epochs, progress.last_validation)
        has_perplexity = not job.functions.has_losses
        reporter = Reporter(
            run_dir and output_dir, options.tensorboard, has_perplexity, options.on_event
        )
        stack.enter_context(reporter)
        reporter.logs = LogFiles(paths, options.mpi_log, job.comm.rank)
        if run_dir:
            job.corpus.tokenizer.save(output_dir)
            # The record comes last, because it turns the directory into a run.
            job.record.write(output_dir, has_checkpoints=run_dir.checkpoint is not None)
    return reporter
