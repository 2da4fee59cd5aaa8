"""A training run, from a config to its test."""

import contextlib
from typing import Any

import tensorflow.compat.v1 as tf

from lm.checkpoint import transfer
from lm.checkpoint.background import BackgroundWriter
from lm.config import Config, RunOptions
from lm.distributed.agreement import check_agreement, graph_facts, on_all_ranks
from lm.distributed.communicator import Communicator
from lm.distributed.devices import session_config
from lm.distributed.supervisor import Supervisor
from lm.errors import RunError, short_message
from lm.events.reporter import Heartbeat, shows_bar
from lm.functions import BUILT_IN, NetworkFunctions
from lm.model import decoding
from lm.model.evaluator import Evaluator
from lm.model.network import Network
from lm.model.sampler import Sampler
from lm.model.windows import WindowRunner
from lm.optimize.averaging import Average
from lm.system import at_stop, keep_freed_memory
from lm.training.checkpointer import Checkpointer
from lm.training.exactness import find_exactness
from lm.training.loop import Graphs, Loop
from lm.training.prepare import Job, prepare
from lm.training.restore import BroadcastHook
from lm.training.start import (
    check_network,
    check_window_order,
    initial_progress,
    open_files,
    results_if_finished,
    values_to_load,
)
from lm.training.step import build_train_graph, divide_rows
from lm.training.summary import report_start


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
        if comm.is_rank_0 and not shows_bar():
            stack.enter_context(contextlib.closing(Heartbeat(lambda: supervisor.activity)))
        stack.enter_context(supervisor.signals.as_interrupt())
        job = prepare(config, options, comm, stack, functions, supervisor)
        try:
            with functions.one_line_errors(running=True), tf.Graph().as_default():
                results = _train(job, supervisor, stack)
        except (MemoryError, tf.errors.ResourceExhaustedError) as error:
            raise RunError(
                f"out of memory ({short_message(error)}): reduce the model or batch_size, use more"
                " hosts, or limit the vocabulary of --tokenizer words with --vocab_size; for a"
                " network of a config file, lower --micro_batches_at_once, or raise --virtual_ranks"
                " (fewer rows per thread, but more sums of gradients; must divide batch_size)"
            ) from error
        with supervisor.exchange("the end of the run"):
            comm.barrier()
    return {"output_dir": job.output_dir, **results}


def _train(job: Job, supervisor: Supervisor, stack: contextlib.ExitStack) -> dict[str, Any]:
    comm, progress = job.comm, initial_progress(job)
    if (results := results_if_finished(job, progress)) is not None:
        return results
    with supervisor.preparing("the building of the graph"), on_all_ranks(comm):
        graphs = _build_graphs(job)
    with supervisor.preparing("the check of the network"), on_all_ranks(comm):
        check_network(job)
    stack.enter_context(supervisor.exchange("the training"))
    check_agreement(comm, graph_facts())
    with on_all_ranks(comm):
        values = values_to_load(job, graphs.network)
    reporter = open_files(job, progress, stack)
    stack.enter_context(at_stop(lambda: reporter.report_end(KeyboardInterrupt())))
    supervisor.on_failure = lambda reason: reporter.report_end(RunError(reason))
    stack.callback(setattr, supervisor, "on_failure", lambda reason: None)
    writer = None
    if job.run_dir:
        keep, resumed = job.options.keep_checkpoints, job.run_dir.checkpoint
        writer = BackgroundWriter(job.output_dir, keep, reporter.sync, resumed)
        # Do not release the directory during a write, even after an error.
        stack.callback(writer.wait)
    exactness = find_exactness(job, graphs.network, progress)
    progress.exact_with = exactness.exact_with
    report_start(job, exactness, progress.step, reporter)
    # MonitoredTrainingSession would create a new session after an error. This rank would then wait
    # forever for the broadcast of the other ranks.
    hook = BroadcastHook(comm, values, graphs.broadcast)
    with supervisor.preparing("the loading of the initial values"):  # from a slow disk
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
        check_window_order(network)
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
