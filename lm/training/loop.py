"""The training loop."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from typing import NoReturn

import tensorflow.compat.v1 as tf

from lm.checkpoint import format as checkpoint
from lm.checkpoint import variables
from lm.checkpoint.records import load_record
from lm.distributed.communicator import Communicator
from lm.distributed.divergence import first_divergence
from lm.distributed.signals import Signals
from lm.distributed.waiting import Interrupted
from lm.distributed.watchdog import Process, Watchdog, own_process
from lm.errors import EveryRankError, Stopped
from lm.model.perplexity import MAX_MEAN_NLL, NllSum
from lm.training.graph import Graph, build_graph
from lm.training.job import Job
from lm.training.optimizer import learning_rate_at
from lm.training.progress import Position
from lm.training.restore import RestoreHook, starting_arrays
from lm.training.saving import Safekeeping
from lm.training.summary import report_start
from lm.training.tracing import StepTracer
from lm.training.validation import Validation


def train(job: Job, comm: Communicator) -> None:
    """Train, validate after each epoch, save, and test at the end.

    Args:
      job: From `lm.job.prepare`.
      comm: The ranks.

    Raises:
      EveryRankError: The run has diverged, the ranks' weights differ, or the last checkpoint
        cannot be written.
      Stopped: A signal has stopped the run.
    """
    signals = Signals()
    ranks = [Process(*process) for process in comm.gather(own_process())]
    watchdog = Watchdog(job.options.step_timeout_seconds, ranks, comm.rank, lambda: signals.stop)
    position = _starting_position(job, comm)
    report_start(job, comm, position)
    with tf.Graph().as_default():
        graph = build_graph(job, comm)
        arrays = starting_arrays(job)
        # Not MonitoredTrainingSession: it recovers from errors by making a new session, on one
        # rank alone, which would then wait for ever for the others' broadcast.
        with tf.train.SingularMonitoredSession(
            hooks=[RestoreHook(arrays), *comm.hooks()], config=job.session_config
        ) as monitored:
            session = monitored.raw_session()
            if position.step:
                variables.load_state(session, arrays, job.rows, comm.concat)
            if job.options.timeline:
                comm.start_timeline(job.options.timeline)
            _Loop(job, comm, graph, session, position, signals, watchdog).run()
            job.reporter.close()
            if job.options.timeline:
                comm.stop_timeline()


def _starting_position(job: Job, comm: Communicator) -> Position:
    # Rank 0 alone reads checkpoints: other hosts need not see its disk.
    own = dataclasses.asdict(job.run_dir.position) if job.run_dir else None
    return load_record(Position, comm.gather(own)[0], "rank 0's position")


class _Loop:
    """Runs the epochs; its fields are what one epoch hands to the next."""

    def __init__(
        self,
        job: Job,
        comm: Communicator,
        graph: Graph,
        session: tf.Session,
        position: Position,
        signals: Signals,
        watchdog: Watchdog,
    ):
        self._job, self._comm, self._graph, self._session = job, comm, graph, session
        self._position, self._signals, self._watchdog = position, signals, watchdog
        self._config, self._options, self._reporter = job.config, job.options, job.reporter
        self._steps_per_epoch = job.batches.steps_per_epoch
        self._last_step = self._config.num_epochs * self._steps_per_epoch
        if job.options.max_steps:
            self._last_step = min(self._last_step, job.options.max_steps)
        self._tracer = StepTracer(job.profile_steps, self._reporter.output_dir)
        self._safe = Safekeeping(job, comm, session, watchdog.beat)
        self._validation = Validation(
            job, comm, session, graph.eval_model, watchdog.beat, lambda: signals.stop
        )

    def run(self) -> None:
        try:
            self._run_epochs()
            self._safe.finish()
            if self._options.eval:
                self._test()
        except Interrupted as interruption:
            self._stop(interruption.number)
        except EveryRankError:
            # To exit in the middle of a write would abort this process, and lose the checkpoint.
            self._safe.wait()
            raise

    def _run_epochs(self) -> None:
        epoch_seconds = []
        last_epoch = math.ceil(self._last_step / self._steps_per_epoch)
        for epoch in range(self._position.epochs_done + 1, last_epoch + 1):
            self._train_epoch(epoch)
            epoch_seconds.append(self._position.epoch_seconds)
            self._finish_epoch(epoch)
        if epoch_seconds:
            mean = sum(epoch_seconds) / len(epoch_seconds)
            self._reporter.log(f"mean time per epoch: {mean:.1f} s")

    def _train_epoch(self, epoch: int) -> None:
        """Run the steps of an epoch that are still to be done."""
        at, reporter = self._position, self._reporter
        first_step = (epoch - 1) * self._steps_per_epoch
        stop = min(epoch * self._steps_per_epoch, self._last_step)
        if at.step == first_step:
            self._session.run(self._graph.model.reset_state_op)
        progress = reporter.progress(epoch, at.step - first_step, self._steps_per_epoch)
        now = time.perf_counter()
        while at.step < stop:
            learning_rate = self._learning_rate(at.step)
            nll, grad_norm, exchange_seconds, requests = self._run_step(learning_rate)
            before, now = now, time.perf_counter()
            at.add(nll, now - before, exchange_seconds)
            # Not at a skipped step, which has no numbers: its event's come with the next.
            if nll.tokens and at.step % self._options.log_every_steps == 0:
                reporter.event(
                    "step",
                    step=at.step,
                    epoch=epoch,
                    loss=at.event_nll.mean,
                    learning_rate=learning_rate,
                    words_per_second=at.event_nll.tokens / at.event_seconds,
                    gradient_norm=grad_norm,
                    exchange_share=at.event_exchange_seconds / at.event_seconds,
                )
                at.event_nll, at.event_seconds, at.event_exchange_seconds = NllSum(), 0.0, 0.0
            speed = at.epoch_nll.tokens / at.epoch_seconds
            done = at.step - first_step
            progress.update(done, at.epoch_nll.perplexity, learning_rate, speed)
            self._serve(requests)
        progress.close()

    def _run_step(self, learning_rate: float) -> tuple[NllSum, float, float, list[bool]]:
        """Run one step.

        Returns:
          The global batch's nll and gradient norm, this rank's seconds in the exchange of
          gradients, and all requests.
        """
        at, graph = self._position, self._graph
        self._watchdog.beat(f"step {at.step + 1}", stoppable=True)
        inputs, targets = self._job.batches.window(at.step % self._steps_per_epoch)
        stop = self._signals.stop
        save = self._signals.save or self._safe.is_due(at.step + 1)
        fetches = [graph.sums, graph.grad_norm, graph.is_sound, graph.exchange_seconds]
        (nats, *requests), grad_norm, is_sound, exchange_seconds, _ = self._tracer.run(
            self._session,
            at.step + 1,
            [*fetches, graph.train_op],
            {
                graph.model.inputs_ph: inputs,
                graph.model.targets_ph: targets,
                graph.learning_rate_ph: learning_rate,
                graph.requests_ph: [stop == signal.SIGTERM, stop == signal.SIGINT, save],
            },
        )
        nll = NllSum(float(nats), self._config.batch_size * self._config.num_steps)
        # The sums over the ranks are the same on all of them, and so is this decision.
        if not is_sound:
            self._skip_update(nll, float(grad_norm), learning_rate)
            nll = NllSum()
        return nll, float(grad_norm), float(exchange_seconds), [r > 0 for r in requests]

    def _skip_update(self, nll: NllSum, grad_norm: float, learning_rate: float) -> None:
        at = self._position
        at.skipped_updates += 1
        is_gradient = nll.mean <= MAX_MEAN_NLL
        what = f"the gradient is {grad_norm}" if is_gradient else f"the loss is {nll.mean:.4g}"
        message = f"{what} at step {at.step + 1}, learning rate {learning_rate:.4g}"
        if self._options.on_nan == "stop":
            raise EveryRankError(f"{message}: lower learning_rate or max_grad_norm")
        if at.skipped_updates > self._options.max_skipped_updates:
            raise EveryRankError(f"{message}: that is the {at.skipped_updates}th skipped update")
        self._reporter.log(f"{message}: this update is skipped")
        # A state that is not finite would spoil all later steps too.
        self._session.run(self._graph.model.reset_state_op)

    def _serve(self, requests: list[bool]) -> None:
        """Do what a rank has asked for, at the same step on all ranks."""
        terminate, interrupt, save = requests
        if terminate or interrupt:
            raise Interrupted(signal.SIGTERM if terminate else signal.SIGINT)
        check_sync_steps = self._options.check_sync_steps
        if check_sync_steps and self._position.step % check_sync_steps == 0:
            self._check_sync()
        if save:
            self._signals.saved()
            self._safe.save(self._position)

    def _stop(self, number: int) -> None:
        at = self._position
        self._safe.save(at)
        self._safe.finish()
        output_dir = f" --output_dir {self._reporter.output_dir}"
        raise Stopped(
            f"stopped by {signal.Signals(number).name} after step {at.step}, which is saved;"
            f" continue with the same command and --resume{output_dir}",
            number,
        )

    def _check_sync(self) -> None:
        self._watchdog.beat("the comparison of the weights")
        weights = variables.read_variables(self._session)
        difference = first_divergence(weights, self._comm.gather)
        if difference:
            self._part(difference)

    def _part(self, difference: str) -> NoReturn:
        try:
            self._safe.save(self._position, in_sync=False)
            self._safe.finish()
            outcome = "rank 0's are saved, and --resume gives them to all ranks"
        except EveryRankError as error:
            outcome = str(error)
        raise EveryRankError(
            f"at step {self._position.step} the ranks disagree on the weights: checksum of"
            f" {difference}; {outcome}; look for hosts with unlike processors, devices or"
            " libraries, a bug in what was changed last, or bad memory where one rank differs"
        )

    def _learning_rate(self, step: int) -> float:
        return learning_rate_at(self._config, step, self._steps_per_epoch, self._comm.size)

    def _finish_epoch(self, epoch: int) -> None:
        at = self._position
        self._check_sync()
        record = dict(
            epoch=epoch,
            train_perplexity=self._perplexity(at.epoch_nll, "train"),
            learning_rate=self._learning_rate(at.step - 1),
            words_per_second=at.epoch_nll.tokens / at.epoch_seconds,
            epoch_seconds=at.epoch_seconds,
            world_size=self._comm.size,
        )
        if self._options.eval:
            self._safe.save(at)  # it is being written during the evaluation, which may be long
            at.valid_perplexity = self._perplexity(self._validation.run("valid"), "valid")
            record["valid_perplexity"] = at.valid_perplexity
        self._report_epoch(**record)
        if at.step == epoch * self._steps_per_epoch:  # --max_steps may end within an epoch
            at.epochs_done, at.epoch_nll, at.epoch_seconds = epoch, NllSum(), 0.0
        self._safe.save(at)
        self._reporter.collect_logs(self._comm.gather)

    def _perplexity(self, nll: NllSum, split: str) -> float:
        """Return it; without one a run has diverged, also if no training step shows it."""
        if not math.isfinite(nll.perplexity):
            raise EveryRankError(
                f"the loss of {split} is {nll.mean:.4g} after step {self._position.step}, learning"
                f" rate {self._learning_rate(self._position.step - 1):.4g}: lower learning_rate or"
                " max_grad_norm"
            )
        return nll.perplexity

    def _report_epoch(self, **record: float) -> None:
        self._reporter.event("epoch", **record)
        line = f"epoch {record['epoch']}  train perplexity {record['train_perplexity']:.2f}"
        if "valid_perplexity" in record:
            line += f"  valid perplexity {record['valid_perplexity']:.2f}"
            line += self._true_value("valid_perplexity")
        speed = record["words_per_second"]
        self._reporter.log(f"{line}  {record['epoch_seconds']:.1f} s  {speed:.0f} words/s")

    def _test(self) -> None:
        if self._options.test_on == "best":
            self._load_best_weights()
        perplexity = self._perplexity(self._validation.run("test"), "test")
        self._reporter.event("test", test_perplexity=perplexity)
        self._reporter.log(f"test perplexity {perplexity:.2f}{self._true_value('test_perplexity')}")
        self._reporter.collect_logs(self._comm.gather)

    def _load_best_weights(self) -> None:
        arrays = None
        if self._job.run_dir:
            arrays = checkpoint.load_weights(checkpoint.find(self._job.run_dir.path, "best"))
        variables.load_weights(self._session, arrays, self._comm.concat)

    def _true_value(self, name: str) -> str:
        truth = self._job.truth
        return f" (true: {getattr(truth, name):.2f})" if truth else ""
