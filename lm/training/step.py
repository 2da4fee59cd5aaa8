"""The graph of a training step, which is equal on all ranks, and the execution of steps."""

from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.data.batches import Rows
from lm.distributed.communicator import Communicator
from lm.distributed.devices import Device
from lm.model.network import Network
from lm.model.variables import freeze
from lm.model.windows import Run, WindowGraph, WindowRunner, build_window_graph
from lm.optimize.algorithms import REPLACED
from lm.optimize.gradients import exchange_gradients
from lm.optimize.local_sums import LocalSums
from lm.optimize.optimizer import Update, build_update
from lm.perplexity import NllSum


class Requests(NamedTuple):
    """Requests of one rank to all ranks."""

    terminate: bool = False  # stop because of SIGTERM
    interrupt: bool = False  # stop because of SIGINT
    save: bool = False


NO_REQUESTS = Requests()
NUM_SUMS = 1 + len(Requests._fields)  # the loss and the requests are summed in one allreduce


class Division(NamedTuple):
    """The division of the local rows into windows."""

    rows: Rows  # rows of the first window; all windows have the same size
    num_threads: int  # number of windows that are computed at the same time
    sums_windows: bool  # whether the gradients of windows are added up afterwards


class TrainGraph(NamedTuple):
    """The tensors and operations of a training step."""

    window: WindowGraph  # window of the rows that one session.run computes
    local_sums: LocalSums | None  # sums over the windows of the local rows; None for one window
    update: Update
    learning_rate_ph: tf.Tensor
    requests_ph: tf.Tensor  # float32 [3]: 1 for each request of this rank
    sums: tf.Tensor  # float32 [4]: nats of the global batch, and the requests
    num_tokens: int  # number of tokens in the global batch


class StepResult(NamedTuple):
    """Results of one step; equal on all ranks except for the seconds."""

    nll: NllSum  # negative log-likelihood of the global batch, or the sum of its sampled losses
    grad_norm: float  # before clipping
    requests: Requests  # the requests of all ranks
    exchange_seconds: float  # time of the exchange that does not overlap with computation


def divide_rows(
    rows: Rows, device: Device, is_built_in: bool, at_once: int | None = None
) -> Division:
    """Divide the local rows into windows.

    The built-in network computes all rows in one window, or `at_once` micro-batches. Its operations
    divide the rows into micro-batches. For a user-defined network, a window is a micro-batch,
    because the results of TensorFlow's operations depend on their shapes. On a GPU, small windows
    would be slow, so a window has all rows.
    """
    if is_built_in or device.gpu is not None:
        of_window = rows.first_micro_batches(at_once or len(rows.micro_batches))
        return Division(of_window, num_threads=1, sums_windows=of_window != rows)
    of_window = rows.first_micro_batches(1)
    return Division(of_window, num_threads=at_once or device.inter_op, sums_windows=True)


def build_train_graph(network: Network, comm: Communicator, division: Division) -> TrainGraph:
    """Build the graph of a training step.

    All ranks must build the same graph, because Horovod matches exchanges by their names.
    """
    config = network.config
    # A config file may have disabled resource variables. One broadcast cannot contain both kinds.
    tf.enable_resource_variables()
    global_step = tf.train.get_or_create_global_step()
    with tf.name_scope("lm_step"):  # keeps these names apart from the variables of user networks
        learning_rate_ph = tf.placeholder(tf.float32, [], "learning_rate")
        requests_ph = tf.placeholder(tf.float32, [len(Requests._fields)], "requests")
        dropout_step = tf.identity(global_step)
    window = build_window_graph(network, division.rows, "train", dropout_step)
    freeze(config.trainable)
    local_sums = LocalSums(window.first_row_ph) if division.sums_windows else None
    sum_locally = local_sums.sum if local_sums else tf.identity
    nll_sum = sum_locally(window.nll_sum)
    changes = [sum_locally(update.change) for update in window.updates]
    # The requests are summed with the loss, so all ranks receive them at the same step.
    sums = comm.sum(tf.concat([nll_sum[None], requests_ph], axis=0), "train/sums")
    # The state of a network may depend on weights that its loss does not use. The state must read
    # these weights before the update changes them.
    with tf.control_dependencies([] if local_sums else list(window.state.values())):
        learning_rate = tf.identity(learning_rate_ph)
    num_tokens = config.batch_size * config.num_steps
    micro_batches, reductions = division.rows.micro_batches, window.separate_reductions
    exchange = exchange_gradients(
        window.loss, num_tokens, comm, micro_batches, reductions, local_sums
    )
    own = network.audit.start_update(global_step, REPLACED)
    update = build_update(config, exchange, learning_rate, global_step, comm, own)
    with tf.control_dependencies([update.grad_norm]):  # all reads see the values before the update
        averages = [
            variable.assign_add(comm.sum(change, f"train/{variable.op.name}")).op
            for (variable, _), change in zip(window.updates, changes)
        ]
    update = update._replace(train_op=tf.group(update.train_op, *averages))
    return TrainGraph(window, local_sums, update, learning_rate_ph, requests_ph, sums, num_tokens)


def run_step(
    run: Run,
    graph: TrainGraph,
    runner: WindowRunner,
    inputs: np.ndarray,
    targets: np.ndarray,
    learning_rate: float,
    requests: Requests = NO_REQUESTS,
) -> StepResult:
    """Train on one window of this rank's rows: int32 [T, B] words and the next words.

    `run` is `session.run` or a replacement.
    """
    update, local_sums = graph.update, graph.local_sums
    fetches = [graph.sums, update.grad_norm, update.exchange_seconds, update.train_op]
    feed = {graph.learning_rate_ph: learning_rate, graph.requests_ph: requests}
    if local_sums is None:
        (found,) = runner.run(run, fetches, inputs, targets, feed)
    else:
        total = runner.run(run, local_sums.of_window, inputs, targets, {}, local_sums.adder(run))
        found = run(fetches, {**feed, **local_sums.feed(total)})
    (nats, *requested), grad_norm, exchange_seconds, _ = found
    return StepResult(
        nll=NllSum(float(nats), graph.num_tokens),
        grad_norm=float(grad_norm),
        requests=Requests(*(count > 0 for count in requested)),
        exchange_seconds=float(exchange_seconds),
    )
