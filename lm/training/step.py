"""One training step: its graph, the same on every rank, and a run of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.data.batches import rows_of_rank
from lm.distributed.communicator import Communicator
from lm.model.network import Network
from lm.model.windows import WindowGraph, build_window_graph
from lm.perplexity import MAX_MEAN_NLL, NllSum
from lm.training.optimizer import Update, build_update


class Requests(NamedTuple):
    """What a rank asks of all ranks."""

    terminate: bool = False  # to stop for SIGTERM
    interrupt: bool = False  # to stop for SIGINT
    save: bool = False


NO_REQUESTS = Requests()
NUM_SUMS = 1 + len(Requests._fields)  # what is exchanged besides the gradients: the loss, and those


class Step(NamedTuple):
    """The tensors and ops of a step."""

    model: WindowGraph
    update: Update
    learning_rate_ph: tf.Tensor
    requests_ph: tf.Tensor  # float32 [3]: 1 for what this rank asks
    sums: tf.Tensor  # float32 [4]: nll of the global batch, in nats; requests
    words: int  # of the global batch


class StepResult(NamedTuple):
    """What a step tells; the same on all ranks, but for the seconds."""

    nll: NllSum  # of the global batch
    grad_norm: float  # before clipping
    requests: Requests  # of all ranks together
    exchange_seconds: float  # of the gradients' exchange, what no computation hides

    @property
    def is_finite(self) -> bool:
        """Whether the perplexity and the norm of the gradient are finite."""
        return self.nll.mean <= MAX_MEAN_NLL and math.isfinite(self.grad_norm)


def build_step(
    network: Network,
    comm: Communicator,
    name: str = "train",
) -> Step:
    """Build the graph of a step; the same on every rank, since op names are Horovod's protocol.

    Args:
      network: Of the current graph; its config has the batch and the clipping too.
      comm: The ranks, each of which trains its share of the rows.
      name: Scope of the model, and of the exchanges.
    """
    config = network.config
    global_step = tf.train.get_or_create_global_step()
    with tf.name_scope("lm_step"):  # as in lm/inference/session.py
        learning_rate_ph = tf.placeholder(tf.float32, [], "learning_rate")
        requests_ph = tf.placeholder(tf.float32, [len(Requests._fields)], "requests")
        dropout_step = tf.identity(global_step)
    rows = rows_of_rank(config.batch_size, comm.rank, comm.size, config.virtual_ranks)
    model = build_window_graph(network, rows, name, dropout_step)
    # Requests travel with the loss, so that all ranks learn of them at the same step.
    sums = comm.sum(tf.concat([model.nll_sum[None], requests_ph], axis=0), f"{name}/sums")
    words = config.batch_size * config.num_steps
    # A network's state may read a weight that its loss does not: before it changes, in every run.
    with tf.control_dependencies([model.carry_state_op]):
        learning_rate = tf.identity(learning_rate_ph)
    update = build_update(
        config,
        model.loss,
        learning_rate,
        global_step,
        comm=comm,
        shares=rows.micro_batches,
        cuts=model.separate_reductions,
    )
    update = update._replace(train_op=tf.group(update.train_op, model.carry_state_op))
    return Step(model, update, learning_rate_ph, requests_ph, sums, words)


def graph_facts(comm: Communicator, model: WindowGraph) -> dict[str, Any]:
    """Return what of the current graph must be the same on all ranks, by name.

    Exchanges find each other by their names: ranks whose graphs differ in one would wait for ever.
    Ranks whose networks differ would train something that nobody asked for. (Where they have not
    as many rows, operations may differ: of small tensors TensorFlow makes constants.)

    Args:
      comm: The ranks.
      model: That is trained.
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
    if len(set(comm.gather(model.inputs_ph.shape.as_list()[1]))) == 1:
        scope = model.inputs_ph.op.name.removesuffix("inputs")
        nodes = [node for node in graph.node if node.name.startswith(scope)]
        wiring = "\n".join(_wiring(nodes, {f.signature.name: f for f in graph.library.function}))
        facts["network (SHA-256)"] = hashlib.sha256(wiring.encode()).hexdigest()
    return facts


def _wiring(nodes: Iterable[Any], functions: Mapping[str, Any]) -> Iterator[str]:
    """Yield which operation reads what, also within loops and conditions, which are functions."""
    for node in nodes:
        yield f"{node.name} {node.op} {node.input}"
        # No more of the attributes: a constant may be the rank's first row, and the names of
        # functions have numbers that each process counts for itself.
        for _, value in sorted(node.attr.items()):
            called = (functions.get(f.name) for f in (value.func, *value.list.func))
            for function in filter(None, called):
                yield from _wiring(function.node_def, functions)
                yield f"{sorted(function.ret.items())}"


def run_step(
    run: Callable[[Any, dict], Any],
    step: Step,
    inputs: np.ndarray,
    targets: np.ndarray,
    learning_rate: float,
    requests: Requests = NO_REQUESTS,
) -> StepResult:
    """Train on one window.

    Args:
      run: `session.run`, or what stands for it.
      step: From `build_step`.
      inputs: int32 [T, B], the rows of this rank.
      targets: int32 [T, B], the words after them.
      learning_rate: Of this step.
      requests: What this rank asks of all.
    """
    update = step.update
    (nats, *asked), grad_norm, exchange_seconds, _ = run(
        [step.sums, update.grad_norm, update.exchange_seconds, update.train_op],
        {
            step.model.inputs_ph: inputs,
            step.model.targets_ph: targets,
            step.learning_rate_ph: learning_rate,
            step.requests_ph: requests,
        },
    )
    return StepResult(
        nll=NllSum(float(nats), step.words),
        grad_norm=float(grad_norm),
        requests=Requests(*(request > 0 for request in asked)),
        exchange_seconds=float(exchange_seconds),
    )
