"""The graph of a training run, the same on every rank."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow.compat.v1 as tf

from lm.data.batches import Rows, eval_rows_of_rank
from lm.distributed.communicator import Communicator
from lm.model.network import build_weights
from lm.model.windows import Model, build_model
from lm.training.job import Job
from lm.training.optimizer import build_update

# What a rank asks of all ranks: to stop for SIGTERM, to stop for SIGINT, to save.
NUM_REQUESTS = 3


class Graph(NamedTuple):
    """The tensors and ops that the loop runs."""

    model: Model
    eval_model: Model
    learning_rate_ph: tf.Tensor
    requests_ph: tf.Tensor  # float32 [NUM_REQUESTS]: 1 for what this rank asks
    train_op: tf.Operation
    sums: tf.Tensor  # float32 [1 + NUM_REQUESTS]: nll of the global batch, in nats; requests
    grad_norm: tf.Tensor
    is_sound: tf.Tensor  # whether the loss and the gradient are those of a model; see Update
    exchange_seconds: tf.Tensor  # of the gradients' exchange, what no computation hides


def build_graph(job: Job, comm: Communicator) -> Graph:
    """Build the graph; the same on every rank, since op names are Horovod's protocol."""
    config, vocab_size = job.config, len(job.corpus.vocabulary)
    global_step = tf.train.get_or_create_global_step()
    learning_rate_ph = tf.placeholder(tf.float32, [], "learning_rate")
    requests_ph = tf.placeholder(tf.float32, [NUM_REQUESTS], "requests")
    weights = build_weights(config, vocab_size)
    model = build_model(config, weights, job.rows, "train", dropout_step=global_step)
    # Requests travel with the loss, so that all ranks learn of them at the same step.
    sums = comm.sum(tf.concat([model.nll_sum[None], requests_ph], axis=0), "sums")
    update = build_update(
        config,
        model.loss,
        learning_rate_ph,
        global_step,
        vocab_size,
        comm,
        mean_nll=sums[0] / (config.batch_size * config.num_steps),
        skip_unsound=job.options.on_nan == "skip",
    )
    eval_rows = eval_rows_of_rank(
        config.eval_batch_size, comm.rank, comm.size, job.options.distributed_eval
    )
    return Graph(
        model=model,
        # A rank without rows builds the smallest model there is.
        eval_model=build_model(
            config, weights, eval_rows if eval_rows.count else Rows(0, 1), "eval"
        ),
        learning_rate_ph=learning_rate_ph,
        requests_ph=requests_ph,
        train_op=tf.group(update.train_op, model.keep_state_op),
        sums=sums,
        grad_norm=update.grad_norm,
        is_sound=update.is_sound,
        exchange_seconds=update.exchange_seconds,
    )
