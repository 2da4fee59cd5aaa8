"""The training loop."""

from __future__ import annotations

import dataclasses
import logging
import math
import shlex
import signal
import time
from typing import Optional

import tensorflow.compat.v1 as tf

from lm.checkpoint import store, variables
from lm.config import Config, RunOptions
from lm.data.batches import TrainBatches
from lm.data.embedded import KnownPerplexity
from lm.distributed.agreement import raise_on_all_ranks
from lm.distributed.communicator import Communicator
from lm.distributed.supervisor import Interrupted, Supervisor
from lm.errors import EveryRankError, Stopped
from lm.events.reporter import Reporter
from lm.events.tracing import StepTracer
from lm.perplexity import MAX_MEAN_NLL, NllSum
from lm.training.averaging import Average
from lm.training.checkpointer import Checkpointer
from lm.training.progress import TrainProgress
from lm.training.schedule import has_stalled, learning_rate_at
from lm.training.step import Requests, StepResult, TrainGraph, run_step
from lm.training.validation import Validation

logger = logging.getLogger("lm")


@dataclasses.dataclass
class Loop:
    """Trains, validates after each epoch, saves, and tests at the end; on all ranks together."""

    config: Config
    options: RunOptions
    comm: Communicator
    batches: TrainBatches
    session: tf.Session
    step: TrainGraph
    average: Optional[Average]  # where the config asks for one
    tracer: StepTracer
    position: TrainProgress  # where the run is; each step moves it
    checkpointer: Checkpointer
    validation: Validation
    reporter: Reporter
    supervisor: Supervisor
    known_perplexity: Optional[KnownPerplexity]  # of a perfect model

    def run(self) -> None:
        """Run the epochs that are still to be done, and the test.

        Raises:
          EveryRankError: The run has diverged, the ranks' weights differ, or the last checkpoint
            cannot be written.
          Stopped: A signal has stopped the run.
        """
        is_saved = False  # in the test the session may have the best weights, not the last ones
        try:
            self._run_epochs()
            self.checkpointer.finish()
            is_saved = True
            if self.options.eval and self.options.test_on != "none":
                self._test()
        except Interrupted as interruption:
            if not is_saved:
                self.checkpointer.save(self.position)
                self.checkpointer.finish()
            raise self._stopped(interruption.number) from None
        except EveryRankError:
            # To exit in the middle of a write would abort this process, and lose the checkpoint.
            self.checkpointer.wait()
            raise

    def _run_epochs(self) -> None:
        steps_per_epoch, epoch_seconds = self.batches.steps_per_epoch, []
        last_step = self.config.num_epochs * steps_per_epoch
        if self.options.max_steps:
            last_step = min(last_step, self.options.max_steps)
        last_epoch = math.ceil(last_step / steps_per_epoch)
        for epoch in range(self.position.epochs_done + 1, last_epoch + 1):
            if has_stalled(self.position.valid_perplexities, self.options.early_stopping_epochs):
                logger.info("validation perplexity does not improve any more: training ends")
                break
            self._train_epoch(epoch, min(epoch * steps_per_epoch, last_step))
            epoch_seconds.append(self.position.epoch_seconds)
            self._finish_epoch(epoch)
        if epoch_seconds:
            mean = sum(epoch_seconds) / len(epoch_seconds)
            logger.info(f"mean time per epoch: {mean:.1f} s")

    def _train_epoch(self, epoch: int, last_step: int) -> None:
        """Run the steps of an epoch that are still to be done."""
        at, steps_per_epoch = self.position, self.batches.steps_per_epoch
        first_step = (epoch - 1) * steps_per_epoch
        if at.step == first_step:
            self.session.run(self.step.model.reset_state_op)
        progress = self.reporter.progress(epoch, at.step - first_step, steps_per_epoch)
        now = time.perf_counter()
        while at.step < last_step:
            learning_rate = self._learning_rate(at.step)
            result = self._run_step(learning_rate)
            before, now = now, time.perf_counter()
            at.add(result.nll, now - before, result.exchange_seconds)
            if at.num_averaged:
                self.average.add(self.session, at.num_averaged)
            if at.step % self.options.log_every_steps == 0:
                self._report_step(epoch, learning_rate, result.grad_norm)
            speed = at.epoch_nll.tokens / at.epoch_seconds
            progress.update(at.step - first_step, at.epoch_nll.perplexity, learning_rate, speed)
            self._serve(result.requests)
        progress.close()

    def _run_step(self, learning_rate: float) -> StepResult:
        at = self.position
        self.supervisor.enter(f"step {at.step + 1}", stoppable=True)
        stop = self.supervisor.signals.stop
        save = self.supervisor.signals.save or self.checkpointer.is_due(at.step + 1)
        result = run_step(
            self.tracer.run_of(at.step + 1),
            self.step,
            *self.batches.window(at.step % self.batches.steps_per_epoch),
            learning_rate,
            Requests(stop == signal.SIGTERM, stop == signal.SIGINT, save),
        )
        if not result.is_finite:
            # The loss and the gradient are the same on all ranks, so all ranks stop.
            mean = result.nll.mean
            loss_is_finite = mean <= MAX_MEAN_NLL
            found = f"gradient is {result.grad_norm}" if loss_is_finite else f"loss is {mean:.4g}"
            raise EveryRankError(
                f"the {found} at step {at.step + 1}, learning rate {learning_rate:.4g}: lower"
                " learning_rate or max_grad_norm"
            )
        return result

    def _report_step(self, epoch: int, learning_rate: float, grad_norm: float) -> None:
        at = self.position
        self.reporter.event(
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

    def _serve(self, requests: Requests) -> None:
        """Do what a rank has asked for, at the same step on all ranks."""
        if requests.terminate or requests.interrupt:
            raise Interrupted(signal.SIGTERM if requests.terminate else signal.SIGINT)
        if requests.save:
            self.supervisor.signals.saved()
            self.checkpointer.save(self.position)

    def _stopped(self, number: int) -> Stopped:
        return Stopped(
            f"stopped by {signal.Signals(number).name} after step {self.position.step}, which is"
            " saved; continue with the same command and --resume --output_dir"
            f" {shlex.quote(str(self.reporter.output_dir))}",
            number,
        )

    def _learning_rate(self, step: int) -> float:
        at, steps = self.position, self.batches.steps_per_epoch
        return learning_rate_at(self.config, step, steps, self.comm.size, at.valid_perplexities)

    def _finish_epoch(self, epoch: int) -> None:
        at = self.position
        record = dict(
            step=at.step,
            epoch=epoch,
            train_perplexity=self._perplexity(at.epoch_nll, "train"),
            learning_rate=self._learning_rate(at.step - 1),
            words_per_second=at.epoch_nll.tokens / at.epoch_seconds,
            epoch_seconds=at.epoch_seconds,
            world_size=self.comm.size,
        )
        if self.options.eval:
            self.checkpointer.save(
                at
            )  # it is being written during the evaluation, which may be long
            nll = self.validation.run(self.session, "valid", at.num_averaged > 0)
            record["valid_perplexity"] = at.valid_perplexity = self._perplexity(nll, "valid")
        self._report_epoch(**record)
        if at.step == epoch * self.batches.steps_per_epoch:  # --max_steps may end within an epoch
            at.finish_epoch(epoch, self.config.asgd_trigger_epochs)
        if at.averages_from == at.step:
            logger.info("validation has stalled: from here on the weights are averaged")
        self.checkpointer.save(at)
        self.reporter.collect_logs(self.comm.gather)

    def _perplexity(self, nll: NllSum, split: str) -> float:
        """Return the perplexity.

        Raises:
          EveryRankError: If the perplexity is not finite; the loss of each step may still be.
        """
        if not math.isfinite(nll.perplexity):
            raise EveryRankError(
                f"the loss of {split} is {nll.mean:.4g} after step {self.position.step}, learning"
                f" rate {self._learning_rate(self.position.step - 1):.4g}: lower learning_rate or"
                " max_grad_norm"
            )
        return nll.perplexity

    def _report_epoch(self, **record: float) -> None:
        self.reporter.event("epoch", **record)
        line = f"epoch {record['epoch']}  train perplexity {record['train_perplexity']:.2f}"
        if "valid_perplexity" in record:
            line += f"  valid perplexity {record['valid_perplexity']:.2f}"
            line += self._true_value("valid_perplexity")
        speed = record["words_per_second"]
        logger.info(f"{line}  {record['epoch_seconds']:.1f} s  {speed:.0f} words/s")

    def _test(self) -> None:
        averaged = self.position.num_averaged > 0
        if self.options.test_on == "best":
            self.supervisor.enter("the reading of the best weights", alone=self.comm.is_rank_0)
            arrays = raise_on_all_ranks(
                self.comm,
                lambda: store.load_weights(store.find(self.reporter.output_dir, "best")),
                takes_part=self.comm.is_rank_0,
            )
            variables.set_shared_weights(self.session, arrays, self.comm.concat)
            averaged = False
        perplexity = self._perplexity(self.validation.run(self.session, "test", averaged), "test")
        step, test_on = self.position.step, self.options.test_on
        self.reporter.event("test", step=step, test_on=test_on, test_perplexity=perplexity)
        logger.info(f"test perplexity {perplexity:.2f}{self._true_value('test_perplexity')}")
        self.reporter.collect_logs(self.comm.gather)

    def _true_value(self, name: str) -> str:
        known = self.known_perplexity
        return f" (true: {getattr(known, name):.2f})" if known else ""
