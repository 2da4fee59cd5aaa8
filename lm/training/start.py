"""The start of a run: its network, initial values and files."""

import contextlib
import dataclasses
import os
from typing import Any

import tensorflow.compat.v1 as tf

from lm import kernels, logger
from lm.checkpoint.progress import TrainProgress
from lm.distributed.agreement import from_rank_0, on_all_ranks
from lm.distributed.devices import session_config
from lm.errors import RunError, UserError
from lm.events.logs import LogFiles
from lm.events.read import Event, drop_events_after, iterate_events
from lm.events.reporter import Reporter
from lm.gemm_peak import flops_per_token, load_peak
from lm.json_files import from_json
from lm.model.network import Network
from lm.record import LOG_FILE
from lm.schedule import has_stalled, planned_steps
from lm.training.initialize import initial_values
from lm.training.initialize_run import warn_of_other_network
from lm.training.prepare import Job
from lm.training.restore import InitialValues, values_to_resume


def check_network(job: Job) -> None:
    """Check a new run's user-defined network by experiment, on rank 0."""
    is_new = job.run_dir and not job.run_dir.checkpoint
    if is_new and job.options.check_network and not job.functions.is_built_in:
        words = job.corpus.tokenizer.tokens
        at_once = job.options.micro_batches_at_once or job.device.inter_op
        device = job.device._replace(inter_op=at_once)
        job.functions.check(job.config, len(words), session_config(device), words)


def check_window_order(network: Network) -> None:
    """Reject shuffled windows if a recurrent state connects the windows."""
    if network.config.window_order == "shuffled" and network.state_shapes:
        raise UserError(
            "window_order shuffled needs a network without recurrent state, but"
            f" {network.where} carries state from window to window: use window_order sequential"
        )


def initial_progress(job: Job) -> TrainProgress:
    """Return the progress of the checkpoint to resume from, or of a new run."""
    checkpoint = job.run_dir and job.run_dir.checkpoint
    progress = checkpoint.manifest.progress if checkpoint else TrainProgress()
    if job.config.ema_decay:
        progress.averages_from = 0
    # Only rank 0 reads checkpoints: the other hosts may not see its disk.
    return from_json(TrainProgress, job.comm.gather(dataclasses.asdict(progress))[0], "rank 0")


def results_if_finished(job: Job, progress: TrainProgress) -> dict[str, Any] | None:
    """Return the recorded test results if the run has finished, or None if work is left to do.

    The results are empty if the run was not tested.
    """
    config, options, total = job.config, job.options, job.batches.steps_per_epoch
    perplexities = progress.epoch_perplexities(total)
    has_ended = has_stalled(perplexities, options.early_stopping_epochs)
    if progress.step < planned_steps(config, total, options.max_steps) and not has_ended:
        return None
    results = from_rank_0(job.comm, lambda: _results_if_tested(job))
    if results is not None:
        logger.info("%s is already finished, at step %d", job.output_dir, progress.step)
    return results


def _results_if_tested(job: Job) -> dict[str, Any] | None:
    """Return the last test results, unless the last job did not finish or did not run this test."""
    test: Event = {}
    last: Event = {}
    with contextlib.suppress(FileNotFoundError):
        for last in iterate_events(job.output_dir, {}):
            if last["event"] == "test":
                test = last
    if last.get("outcome") != "finished" or job.test_on not in ("none", test.get("test_on")):
        return None
    return {name: value for name, value in test.items() if name not in ("event", "step")}


def values_to_load(job: Job, network: Network) -> InitialValues | None:
    """Return the values to load on rank 0, which reads checkpoints for all ranks."""
    if job.run_dir and job.run_dir.checkpoint:
        checkpoint = job.run_dir.checkpoint
        if checkpoint.manifest.progress.exact_with and kernels.is_missing():
            raise RunError(
                "this run is exact so far, and needs the compiled ops to stay exact"
                f" ({kernels.description()}); to continue it inexactly, set LM_KERNELS=0"
            )
        return values_to_resume(checkpoint, network.state_shapes)
    if job.source:
        if job.source.checkpoint:
            warn_of_other_network(job.source.checkpoint.manifest.record.config, job.config)
        return initial_values(job.source, job.options, job.corpus.tokenizer, job.functions)
    return None


def open_files(job: Job, progress: TrainProgress, stack: contextlib.ExitStack) -> Reporter:
    """Open the event and log files, and write the record and the tokenizer.

    Events that the run will repeat are removed. Call this function after everything that may fail,
    because a run that cannot start must not change its files.
    """
    options, run_dir, output_dir = job.options, job.run_dir, job.output_dir
    paths = [os.path.join(output_dir, LOG_FILE)]
    if options.log_path:
        paths.append(options.log_path)
    peak_speed = _peak_speed(job)
    with on_all_ranks(job.comm):
        logs = LogFiles(paths, options.mpi_log, job.comm.rank)
        stack.callback(logs.close)
    with on_all_ranks(job.comm):
        if run_dir:
            step, epochs = progress.step, progress.epochs_done
            drop_events_after(output_dir, step, epochs, progress.last_validation)
        has_perplexity = not job.functions.has_losses
        reporter = Reporter(
            run_dir and output_dir, options.tensorboard, has_perplexity, options.on_event
        )
        stack.enter_context(reporter)
        reporter.peak_speed, reporter.logs = peak_speed, logs
        if run_dir:
            job.corpus.tokenizer.save(output_dir)
            # The record comes last, because it turns the directory into a run.
            job.record.write(output_dir, has_checkpoints=run_dir.checkpoint is not None)
    return reporter


def _peak_speed(job: Job) -> float | None:
    """Return the tokens/s at the GEMM peak of all ranks, or None if it is not known.

    The products of user-defined networks are unknown. The products of the adaptive softmax depend
    on the words. If weights are frozen, the backward pass depends on their layers.
    """
    config, device = job.config, job.device
    own = load_peak(config.precision, device.intra_op) if device.gpu is None else None
    peaks = job.comm.gather(own)
    is_partial = config.adaptive_softmax_cutoffs or config.trainable
    if None in peaks or not job.functions.is_built_in or is_partial:
        return None
    shapes = {v.op.name: v.shape.as_list() for v in tf.trainable_variables()}
    return sum(peaks) / flops_per_token(shapes, config.tie_weights)
