"""The training loop."""

from __future__ import annotations

import dataclasses
import math
import socket
import time
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from lm.batches import EvalBatches, Rows
from lm.distributed import Communicator
from lm.errors import EveryRankError
from lm.evaluation import run_evaluation
from lm.job import Job
from lm.metrics import NllSum
from lm.model import Model, build_model, build_weights
from lm.optimizer import build_update, learning_rate_at
from lm.session import device_name


class Graph(NamedTuple):
    """The tensors and ops that the loop runs."""

    model: Model
    eval_model: Model
    learning_rate_ph: tf.Tensor
    train_op: tf.Operation
    nll_sum: tf.Tensor  # of the global batch, in nats
    grad_norm: tf.Tensor


def train(job: Job, comm: Communicator) -> None:
    """Train, validate after each epoch, and test at the end.

    Args:
      job: From `lm.job.prepare`.
      comm: The ranks.

    Raises:
      EveryRankError: The loss is not finite.
    """
    _report_start(job, comm)
    with tf.Graph().as_default():
        graph = build_graph(job, comm)
        # Not MonitoredTrainingSession: it recovers from errors by making a new session, on one
        # rank alone, which would then wait for ever for the others' broadcast.
        with tf.train.SingularMonitoredSession(
            hooks=comm.hooks(), config=job.session_config
        ) as monitored:
            _Loop(job, comm, graph, monitored.raw_session()).run()


def build_graph(job: Job, comm: Communicator) -> Graph:
    """Build the graph; the same on every rank, since op names are Horovod's protocol."""
    config, vocab_size = job.config, len(job.corpus.vocabulary)
    global_step = tf.train.get_or_create_global_step()
    learning_rate_ph = tf.placeholder(tf.float32, [], "learning_rate")
    weights = build_weights(config, vocab_size)
    model = build_model(config, weights, job.rows, "train", dropout_step=global_step)
    # The rows of all ranks are summed and divided by the GLOBAL batch size, so shares of
    # different sizes weigh as they should.
    loss = model.nll_sum / config.batch_size
    update = build_update(
        config, loss, learning_rate_ph, global_step, vocab_size, comm.distribute
    )
    eval_rows = Rows(0, config.eval_batch_size)
    return Graph(
        model=model,
        eval_model=build_model(config, weights, eval_rows, "eval"),
        learning_rate_ph=learning_rate_ph,
        train_op=tf.group(update.train_op, model.keep_state_op),
        nll_sum=comm.sum(model.nll_sum, "nll_sum"),
        grad_norm=update.grad_norm,
    )


class _Loop:
    """Runs the epochs; its fields are what one epoch hands to the next."""

    def __init__(self, job: Job, comm: Communicator, graph: Graph, session: tf.Session):
        self._job, self._comm, self._graph, self._session = job, comm, graph, session
        self._config, self._reporter = job.config, job.reporter
        self._steps_per_epoch = job.batches.steps_per_epoch
        self._last_step = self._config.num_epochs * self._steps_per_epoch
        if job.options.max_steps:
            self._last_step = min(self._last_step, job.options.max_steps)
        self._step = 0

    def run(self) -> None:
        epoch_seconds = []
        while self._step < self._last_step:
            epoch = self._step // self._steps_per_epoch + 1
            start = time.perf_counter()
            train_nll = self._train_epoch(epoch)
            epoch_seconds.append(time.perf_counter() - start)
            self._finish_epoch(epoch, train_nll, epoch_seconds[-1])
        self._reporter.log(
            f"mean time per epoch: {sum(epoch_seconds) / len(epoch_seconds):.1f} s"
        )
        if self._job.options.eval:
            self._test()

    def _train_epoch(self, epoch: int) -> NllSum:
        """Run the steps of an epoch; returns the global nll of all its tokens."""
        options = self._job.options
        tokens = self._config.batch_size * self._config.num_steps
        total, since_event = NllSum(), NllSum()
        start = event_start = time.perf_counter()
        self._session.run(self._graph.model.reset_state_op)
        stop = min(epoch * self._steps_per_epoch, self._last_step)
        while self._step < stop:
            learning_rate = self._learning_rate()
            nll = NllSum(self._run_step(learning_rate), tokens)
            total, since_event = total + nll, since_event + nll
            if self._step % options.log_every_steps == 0:
                now = time.perf_counter()
                self._reporter.event(
                    "step",
                    step=self._step,
                    epoch=epoch,
                    loss=since_event.mean,
                    learning_rate=learning_rate,
                    words_per_second=since_event.tokens / (now - event_start),
                )
                since_event, event_start = NllSum(), now
            if self._is_tenth_of_epoch():
                speed = total.tokens / (time.perf_counter() - start)
                self._reporter.log(
                    f"epoch {epoch}  step {self._step}  train perplexity"
                    f" {total.perplexity:.2f}  learning rate {learning_rate:.4g}"
                    f"  {speed:.0f} words/s"
                )
        return total

    def _run_step(self, learning_rate: float) -> float:
        """Run one step; returns the nll of the global batch, in nats."""
        inputs, targets = self._job.batches.window(self._step % self._steps_per_epoch)
        graph = self._graph
        nats, _ = self._session.run(
            [graph.nll_sum, graph.train_op],
            {
                graph.model.inputs_ph: inputs,
                graph.model.targets_ph: targets,
                graph.learning_rate_ph: learning_rate,
            },
        )
        self._step += 1
        if not math.isfinite(nats):
            # The sum over the ranks is the same on all of them, and so is this decision.
            raise EveryRankError(
                f"the loss is {nats} at step {self._step}, learning rate {learning_rate:.4g}:"
                " lower learning_rate or max_grad_norm"
            )
        return float(nats)

    def _learning_rate(self) -> float:
        return learning_rate_at(
            self._config, self._step, self._steps_per_epoch, self._comm.size
        )

    def _is_tenth_of_epoch(self) -> bool:
        done = (self._step - 1) % self._steps_per_epoch + 1
        tenths = 10 * done // self._steps_per_epoch
        return tenths > 10 * (done - 1) // self._steps_per_epoch

    def _finish_epoch(self, epoch: int, train_nll: NllSum, seconds: float) -> None:
        speed = train_nll.tokens / seconds
        record = dict(
            epoch=epoch,
            train_perplexity=train_nll.perplexity,
            learning_rate=self._learning_rate_of(epoch),
            words_per_second=speed,
            epoch_seconds=seconds,
            world_size=self._comm.size,
        )
        line = f"epoch {epoch}  train perplexity {train_nll.perplexity:.2f}"
        if self._job.options.eval:
            record["valid_perplexity"] = self._evaluate(self._job.corpus.valid).perplexity
            line += f"  valid perplexity {record['valid_perplexity']:.2f}"
            line += self._true_value("valid_perplexity")
        self._reporter.event("epoch", **record)
        self._reporter.log(f"{line}  {seconds:.1f} s  {speed:.0f} words/s")

    def _learning_rate_of(self, epoch: int) -> float:
        last_step = min(epoch * self._steps_per_epoch, self._last_step) - 1
        return learning_rate_at(self._config, last_step, self._steps_per_epoch, self._comm.size)

    def _test(self) -> None:
        perplexity = self._evaluate(self._job.corpus.test).perplexity
        self._reporter.event("test", test_perplexity=perplexity)
        self._reporter.log(
            f"test perplexity {perplexity:.2f}{self._true_value('test_perplexity')}"
        )

    def _true_value(self, name: str) -> str:
        truth = self._job.truth
        return f" (true: {getattr(truth, name):.2f})" if truth else ""

    def _evaluate(self, ids) -> NllSum:
        """Evaluate a split on rank 0, while the others wait; returns rank 0's result on all."""
        nll = NllSum()
        if self._comm.is_chief:
            batches = EvalBatches(
                ids,
                self._config.eval_batch_size,
                self._config.num_steps,
                self._job.corpus.vocabulary.eos_id,
            )
            nll = run_evaluation(self._session, self._graph.eval_model, batches)
        return NllSum(*self._comm.gather(dataclasses.astuple(nll))[0])


def _report_start(job: Job, comm: Communicator) -> None:
    processes = comm.gather(
        {"host": socket.gethostname(), "device": device_name(comm.local_rank)}
    )
    job.reporter.write_json("config.json", dataclasses.asdict(job.config))
    job.reporter.event(
        "start",
        world_size=comm.size,
        hosts=[process["host"] for process in processes],
        devices=[process["device"] for process in processes],
        backend=comm.backend,
        tensorflow=tf.__version__,
        intra_op_threads=job.threads.intra_op,
        inter_op_threads=job.threads.inter_op,
        corpus=job.corpus.name,
        vocab_size=len(job.corpus.vocabulary),
        steps_per_epoch=job.batches.steps_per_epoch,
    )
    job.reporter.log(
        f"training {job.config.name} on {comm.size} rank(s), batch_size"
        f" {job.config.batch_size}, {job.threads.intra_op} thread(s) a rank,"
        f" output_dir {job.reporter.output_dir}"
    )
