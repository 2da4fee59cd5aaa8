"""The training loop."""

import contextlib
import dataclasses
import math
import shlex
import signal
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from lm import logger
from lm.checkpoint import store, transfer
from lm.checkpoint.progress import TrainProgress
from lm.distributed.agreement import on_all_ranks
from lm.distributed.signals import stopped_by
from lm.distributed.supervisor import Interrupted, Supervisor
from lm.errors import Diverged, EveryRankError, Stopped
from lm.events.reporter import Reporter
from lm.model.evaluator import Evaluator
from lm.model.network import Network
from lm.model.sampler import Sampler
from lm.model.windows import WindowRunner
from lm.optimize.averaging import Average
from lm.perplexity import NllSum, metrics_text, text_metrics
from lm.schedule import has_stalled, learning_rate_at, planned_steps
from lm.system import peak_memory_mb
from lm.tokens.symbols import Characters
from lm.training.checkpointer import Checkpointer
from lm.training.prepare import Job
from lm.training.session_calls import SessionCalls
from lm.training.step import Requests, StepResult, TrainGraph, run_step


class Graphs(NamedTuple):
    """The graphs of a run."""

    network: Network
    train: TrainGraph
    runner: WindowRunner  # runs the training windows of the local rows
    evaluator: Evaluator
    average: Average | None  # average of the weights, if the config requests it
    sampler: Sampler | None  # draws texts, if an option requests it
    broadcast: Any  # fetches that give all ranks the variables of rank 0
    reader: transfer.VariableReader
    loader: transfer.VariableLoader | None  # loads the best weights, if they are tested


@dataclasses.dataclass
class Loop:
    """Trains, validates after each epoch, saves, and tests at the end, on all ranks together."""

    job: Job
    graphs: Graphs
    session: tf.Session
    supervisor: Supervisor
    checkpointer: Checkpointer
    reporter: Reporter
    progress: TrainProgress  # advances with each step

    def __post_init__(self) -> None:
        self._run_session = SessionCalls(self.session)
        self._steps_per_epoch = self.job.batches.steps_per_epoch
        config, max_steps = self.job.config, self.job.options.max_steps
        self._last_step = planned_steps(config, self._steps_per_epoch, max_steps)
        self.results: dict[str, Any] = {}  # results of the last epoch and of the test

    def run(self) -> None:
        """Run the remaining epochs and the test."""
        self.supervisor.signals.defer()
        is_saved = False  # during the test, the session may hold the best weights, not the last
        try:
            self._run_epochs()
            self.checkpointer.finish()
            is_saved = True
            if self.job.test_on != "none":
                self._test()
        except Interrupted as interruption:
            if not is_saved:
                self.checkpointer.save(self.progress)
                self.checkpointer.finish()
            raise self._stopped(interruption.number) from None
        except EveryRankError:
            # Exiting during a write would abort this process and lose the checkpoint.
            self.checkpointer.wait()
            raise

    def _run_epochs(self) -> None:
        options, seconds = self.job.options, 0.0
        epochs_before = self.progress.epochs_done
        last_epoch = math.ceil(self._last_step / self._steps_per_epoch)
        for epoch in range(self.progress.epochs_done + 1, last_epoch + 1):
            perplexities = self.progress.epoch_perplexities(self._steps_per_epoch)
            if has_stalled(perplexities, options.early_stopping_epochs):
                self.reporter.early_end = "the validation perplexity no longer improves"
                logger.info("%s: training ends", self.reporter.early_end)
                break
            self._train_epoch(epoch)
            seconds += self.progress.epoch_seconds
            self._finish_epoch(epoch)
        if seconds:
            total = self._steps_per_epoch
            steps = self.progress.step - epochs_before * total
            part = f", from {steps} of its {total} steps" if steps < total else ""
            logger.info(f"mean time per epoch: {seconds / steps * total:.1f} s{part}")

    def _train_epoch(self, epoch: int) -> None:
        """Run the remaining steps of an epoch."""
        at, first_step = self.progress, (epoch - 1) * self._steps_per_epoch
        last_step = min(epoch * self._steps_per_epoch, self._last_step)
        if at.step == first_step:
            self.graphs.runner.reset_state()
        done, ends = at.step - first_step, (last_step - first_step, self._last_step - first_step)
        bar = self.reporter.progress(epoch, done, self._steps_per_epoch, ends)
        now = time.perf_counter()
        with contextlib.closing(bar):
            while at.step < last_step:
                # Validate before the next step, so that a job that resumes here validates too.
                if self._validation_is_due():
                    self._validate_within_epoch(epoch)
                    now = time.perf_counter()
                learning_rate = self._learning_rate(at.step)
                result = self.take_step(learning_rate)
                before, now = now, time.perf_counter()
                at.add(result.nll, now - before, result.exchange_seconds)
                if at.num_averaged:
                    self.graphs.average.add(self._run_session, at.num_averaged)
                if at.step % self.job.options.log_every_steps == 0:
                    self._report_step(epoch, learning_rate, result.grad_norm)
                quality = self._quality(at.epoch_nll)
                bar.update(quality, learning_rate, result.nll.tokens, now - before)
                has_sampled = self._sample_if_due()
                self._serve(result.requests)
                if has_sampled or result.requests.save:
                    now = time.perf_counter()

    def take_step(self, learning_rate: float) -> StepResult:
        """Train one step on all ranks. The fault tests wrap this method to inject faults."""
        step, signals = self.progress.step, self.supervisor.signals
        stop = signals.stop
        save = signals.save or self.checkpointer.is_due(step + 1)
        requests = Requests(stop == signal.SIGTERM, stop == signal.SIGINT, save)
        window, graphs = self.job.batches.window(step), self.graphs
        with self.supervisor.exchange(f"step {step + 1}"):
            result = run_step(
                self._run_session, graphs.train, graphs.runner, *window, learning_rate, requests
            )
        # The loss and the norm are equal on all ranks, so every rank stops here.
        nll, grad_norm = result.nll, result.grad_norm
        # The perplexity may be infinite although the loss is finite.
        is_loss = not (math.isfinite(nll.mean) and math.isfinite(self._quality(nll)[1]))
        if is_loss or not math.isfinite(grad_norm):
            found = f"loss is {nll.mean:.4g}" if is_loss else f"gradient is {grad_norm}"
            raise Diverged(
                f"the {found} at step {step + 1}, learning rate {learning_rate:.4g}: lower"
                " learning_rate or max_grad_norm"
            )
        return result

    def _report_step(self, epoch: int, learning_rate: float, grad_norm: float) -> None:
        at, exchange = self.progress, {}
        if self.job.device.gpu is None:  # a GPU would only time the launches of its kernels
            exchange["exchange_share"] = at.event_exchange_seconds / at.event_seconds
        self.reporter.event(
            "step",
            step=at.step,
            epoch=epoch,
            loss=at.event_nll.mean,
            learning_rate=learning_rate,
            tokens_per_second=at.event_nll.tokens / at.event_seconds,
            gradient_norm=grad_norm,
            **exchange,
        )
        at.event_nll, at.event_seconds, at.event_exchange_seconds = NllSum(), 0.0, 0.0

    def _sample_if_due(self) -> bool:
        """Report a short text on rank 0, while the other ranks wait in the next exchange."""
        step, every = self.progress.step, self.job.options.sample_every_steps
        if not every or step % every or not self.job.comm.is_rank_0:
            return False
        with self._average_in_place():
            tokens = self.graphs.sampler.draw(self.session, (self.job.config.seed, step))
        text = self.job.corpus.tokenizer.decode(tokens)
        self.reporter.event("sample", step=step, text=text)
        logger.info("step %d  sample: %s", step, " / ".join(text.splitlines()))
        return True

    def _serve(self, requests: Requests) -> None:
        """Serve the requests of all ranks, at the same step on all ranks."""
        if requests.terminate or requests.interrupt:
            raise Interrupted(signal.SIGTERM if requests.terminate else signal.SIGINT)
        if requests.save:
            self.supervisor.signals.saved()
            self.checkpointer.save(self.progress)

    def _stopped(self, number: int) -> Stopped:
        return Stopped(
            f"{stopped_by(number)} after step {self.progress.step}, which is"
            " saved; continue with the same command and --resume --output_dir"
            f" {shlex.quote(self.job.output_dir)}",
            number,
        )

    def _learning_rate(self, step: int) -> float:
        config, perplexities = self.job.config, self.progress.valid_perplexities
        size = self.job.comm.size
        return learning_rate_at(config, step, self._steps_per_epoch, size, perplexities)

    def _quality(self, nll: NllSum) -> tuple[str, float]:
        """Return the name and the value of the perplexity, or of the mean of sampled losses."""
        is_sampled = self.job.functions.has_losses
        return ("loss", nll.mean) if is_sampled else ("perplexity", nll.perplexity)

    def _validation_is_due(self) -> bool:
        """Return whether to validate within an epoch; at its end, `_finish_epoch` validates."""
        at, every = self.progress, self.job.config.eval_every_steps
        is_due = every and at.step % every == 0 and at.step % self._steps_per_epoch != 0
        return bool(is_due and self.job.options.eval and at.last_validation < at.step)

    def _validate_within_epoch(self, epoch: int) -> None:
        at = self.progress
        metrics = self._evaluate("valid")
        at.valid_perplexity = metrics["perplexity"]
        is_best = at.valid_perplexity < min(at.valid_perplexities, default=math.inf)
        at.record_validation()
        self.reporter.event("validation", step=at.step, epoch=epoch, **_named("valid", metrics))
        logger.info(f"{self._position(epoch)}  {self._quality_text('valid', metrics)}")
        if is_best:
            self.checkpointer.save(at)

    def _finish_epoch(self, epoch: int) -> None:
        at, comm = self.progress, self.job.comm
        name, value = self._quality(at.epoch_nll)
        record = dict(
            step=at.step,
            epoch=epoch,
            epochs=at.step / self._steps_per_epoch,  # --max_steps can end the last epoch early
            learning_rate=self._learning_rate(at.step - 1),
            tokens_per_second=at.epoch_nll.tokens / at.epoch_seconds,
            epoch_seconds=at.epoch_seconds,
            world_size=comm.size,
            **{f"train_{name}": value},
        )
        line = f"{self._position(epoch)}  train {name} {value:.2f}"
        if self.job.options.eval:
            self.checkpointer.save(at)  # written in the background during the evaluation
            metrics = self._evaluate("valid")
            at.valid_perplexity = metrics["perplexity"]
            record.update(_named("valid", metrics))
            line += f"  {self._quality_text('valid', metrics)}"
        record["memory_mb"] = max(comm.gather(peak_memory_mb()))  # peak memory of the largest rank
        self.reporter.event("epoch", **record)
        self.results = record
        speed = record["tokens_per_second"]
        logger.info(f"{line}  {at.epoch_seconds:.1f} s  {speed:.0f} tokens/s")
        if at.step == epoch * self._steps_per_epoch:  # --max_steps may end within an epoch
            at.finish_epoch(epoch, self.job.config.asgd_trigger_epochs)
        if at.averages_from == at.step:
            logger.info("the validation perplexity stalls: from now on, weights are averaged")
        self.checkpointer.save(at)
        self.reporter.logs.collect(comm.gather)

    def _average_in_place(self) -> contextlib.AbstractContextManager:
        """Return a context in which the average replaces the weights, if there is an average."""
        if not self.progress.num_averaged:
            return contextlib.nullcontext()
        return self.graphs.average.in_place(self.session)

    def _evaluate(self, split: str, use_average: bool = True) -> dict[str, float]:
        """Return the metrics of "valid" or "test"; see `text_metrics`."""
        corpus = self.job.corpus
        shared = self.job.options.distributed_eval
        name = f"the evaluation of {split}" + ("" if shared else " on rank 0")
        averaged = self._average_in_place() if use_average else contextlib.nullcontext()
        with averaged, self.supervisor.waiting(name) as waiting:
            nll = self.graphs.evaluator.run(
                self._run_session, split, getattr(corpus, split), waiting.gather, waiting.poll
            )
        if not math.isfinite(nll.perplexity):
            raise Diverged(
                f"the loss of {split} is {nll.mean:.4g} after step {self.progress.step}, learning"
                f" rate {self._learning_rate(self.progress.step - 1):.4g}: lower learning_rate or"
                " max_grad_norm"
            )
        encoded, has_characters = corpus.encoded[split], isinstance(corpus.tokenizer, Characters)
        return text_metrics(nll, encoded.size, encoded.unknown, has_characters)

    def _position(self, epoch: int) -> str:
        """Name an epoch, and the step if it is not at its end."""
        total = self._steps_per_epoch
        step = self.progress.step - (epoch - 1) * total
        return f"epoch {epoch}" + (f"  step {step}/{total}" if step < total else "")

    def _quality_text(self, split: str, metrics: Mapping[str, float]) -> str:
        known = self.job.corpus.known_perplexity
        true = getattr(known, f"{split}_perplexity") if known else None
        return f"{split} {metrics_text(metrics, true)}"

    def _test(self) -> None:
        comm, test_on = self.job.comm, self.job.options.test_on
        if test_on == "best":
            with self.supervisor.preparing("the reading of the best weights"):  # a slow disk
                with on_all_ranks(comm):
                    if comm.is_rank_0:
                        best = store.find(self.job.output_dir, "best")
                        self.graphs.loader.load_weights(self.session, best)
                self.session.run(self.graphs.broadcast)
        # The best weights are loaded as an average, if there is one.
        metrics = self._evaluate("test", use_average=test_on != "best")
        step = self.progress.step
        self.reporter.event("test", step=step, test_on=test_on, **_named("test", metrics))
        self.results |= {"test_on": test_on, **_named("test", metrics)}
        logger.info(self._quality_text("test", metrics))
        self.reporter.logs.collect(comm.gather)


def _named(split: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a split under the names of their fields in events."""
    return {f"{split}_{name}": value for name, value in metrics.items()}
