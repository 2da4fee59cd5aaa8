"""The graph of a training step, which is equal on all ranks, and the execution of steps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.data.batches import Rows
from lm.distributed.communicator import Communicator
from lm.model.network import Network
from lm.model.windows import WindowGraph, build_window_graph
from lm.perplexity import MAX_MEAN_NLL, NllSum
from lm.training.optimizer import Update, build_update


class Requests(NamedTuple):
    """Requests of one rank to all ranks."""

    terminate: bool = False  # stop because of SIGTERM
    interrupt: bool = False  # stop because of SIGINT
    save: bool = False


NO_REQUESTS = Requests()
NUM_SUMS = 1 + len(Requests._fields)  # the loss and the requests are summed in one allreduce


class TrainGraph(NamedTuple):
    """The tensors and operations of a training step."""

    window: WindowGraph
    update: Update
    learning_rate_ph: tf.Tensor
    requests_ph: tf.Tensor  # float32 [3]: 1 for each request of this rank
    sums: tf.Tensor  # float32 [4]: nats of the global batch, and the requests
    words: int  # number of words in the global batch


class StepResult(NamedTuple):
    """Results of one step; equal on all ranks except for the seconds."""

    nll: NllSum  # negative log-likelihood of the global batch
    grad_norm: float  # before clipping
    requests: Requests  # the requests of all ranks
    exchange_seconds: float  # time of the exchange that does not overlap with computation

    @property
    def is_finite(self) -> bool:
        """Whether the perplexity and the norm of the gradient are finite."""
        return self.nll.mean <= MAX_MEAN_NLL and math.isfinite(self.grad_norm)


def build_train_graph(network: Network, comm: Communicator, rows: Rows) -> TrainGraph:
    """Build the graph of a training step.

    All ranks must build the same graph, because Horovod matches exchanges by their names.
    """
    config = network.config
    global_step = tf.train.get_or_create_global_step()
    with tf.name_scope("lm_step"):  # keeps these names apart from the variables of user networks
        learning_rate_ph = tf.placeholder(tf.float32, [], "learning_rate")
        requests_ph = tf.placeholder(tf.float32, [len(Requests._fields)], "requests")
        dropout_step = tf.identity(global_step)
    window = build_window_graph(network, rows, "train", dropout_step)
    # The requests are summed with the loss, so all ranks receive them at the same step.
    sums = comm.sum(tf.concat([window.nll_sum[None], requests_ph], axis=0), "train/sums")
    # The state of a network may depend on weights that its loss does not use. The state must read
    # these weights before the update changes them.
    with tf.control_dependencies([window.carry_state_op]):
        learning_rate = tf.identity(learning_rate_ph)
    update = build_update(
        config,
        window.loss,
        learning_rate,
        global_step,
        comm,
        rows.micro_batches,
        window.separate_reductions,
    )
    update = update._replace(train_op=tf.group(update.train_op, window.carry_state_op))
    words = config.batch_size * config.num_steps
    return TrainGraph(window, update, learning_rate_ph, requests_ph, sums, words)


def run_step(
    run: Callable[[Any, dict], Any],
    graph: TrainGraph,
    inputs: np.ndarray,
    targets: np.ndarray,
    learning_rate: float,
    requests: Requests = NO_REQUESTS,
) -> StepResult:
    """Train on one window of this rank's rows: int32 [T, B] words and the next words.

    `run` is `session.run` or a replacement.
    """
    update = graph.update
    (nats, *requested), grad_norm, exchange_seconds, _ = run(
        [graph.sums, update.grad_norm, update.exchange_seconds, update.train_op],
        {
            graph.window.inputs_ph: inputs,
            graph.window.targets_ph: targets,
            graph.learning_rate_ph: learning_rate,
            graph.requests_ph: requests,
        },
    )
    return StepResult(
        nll=NllSum(float(nats), graph.words),
        grad_norm=float(grad_norm),
        requests=Requests(*(count > 0 for count in requested)),
        exchange_seconds=float(exchange_seconds),
    )


def graph_facts(comm: Communicator, window: WindowGraph) -> dict[str, Any]:
    """Return the facts about the current graph that must be equal on all ranks.

    If the name of an exchange differed, the ranks would wait forever. If the network differed, they
    would train the wrong run. Operations may differ between ranks with different
    numbers of rows, because TensorFlow turns small tensors into constants.
    """
    variables = {f"variable {v.op.name}": v.shape.as_list() for v in tf.global_variables()}
    graph = tf.get_default_graph().as_graph_def()
    nodes = [*graph.node, *(node for body in graph.library.function for node in body.node_def)]
    exchanges = {
        f"exchange {node.attr['tensor_name'].s.decode() or node.name}": node.op
        for node in nodes
        if node.op.startswith("Horovod")
    }
    facts = {**variables, **exchanges}
    if len(set(comm.gather(window.inputs_ph.shape.as_list()[1]))) == 1:
        scope = window.inputs_ph.op.name.removesuffix("inputs")
        nodes = [node for node in graph.node if node.name.startswith(scope)]
        wiring = "\n".join(_wiring(nodes, {f.signature.name: f for f in graph.library.function}))
        facts["network (SHA-256)"] = hashlib.sha256(wiring.encode()).hexdigest()
    return facts


def _wiring(nodes: Iterable[Any], functions: Mapping[str, Any]) -> Iterator[str]:
    """Yield each operation and its inputs, including the functions of loops and conditions."""
    for node in nodes:
        yield f"{node.name} {node.op} {node.input}"
        # Ignore other attributes: a constant may be the first row of the rank, and the names of
        # functions contain numbers that each process counts on its own.
        for _, value in sorted(node.attr.items()):
            called = (functions.get(f.name) for f in (value.func, *value.list.func))
            for function in filter(None, called):
                yield from _wiring(function.node_def, functions)
                yield f"{sorted(function.ret.items())}"
