"""Measurements in TensorFlow: the training step of `lm.train`, the GEMM peak and the exchange."""

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.benchmark.workload import Step, StepResult, initial_weight, network_of
from lm.config import Config
from lm.data.batches import TrainBatches, rows_of_rank
from lm.distributed.communicator import Communicator
from lm.distributed.devices import session_config, start_tensorflow
from lm.errors import UserError
from lm.functions import NetworkFunctions
from lm.model.network import Network
from lm.model.windows import WindowRunner
from lm.training import step as training
from lm.training.session_calls import SessionCalls

_GEMM_SIZE = 2048  # large enough that only arithmetic limits the product
_GEMM_PRODUCTS = 5
_UNTIMED_EXCHANGES, _EXCHANGES = 3, 20
_UNTIMED_PRODUCTS, _PRODUCTS = 2, 30
_UNTIMED_STEPS, _TRACED_STEPS = 5, 50


def build_step(
    config: Config,
    functions: NetworkFunctions,
    vocab_size: int,
    threads: int,
    comm: Communicator,
    prepare: Callable[[tf.Session], Callable] = SessionCalls,
) -> tuple[Step, dict[str, Any]]:
    """Build the training step of `lm.train`, and return the step and facts about it.

    `prepare` returns a replacement of `session.run`.
    The facts are the `device`, the `kernels`, the `shapes` of the trainable variables and the
    `network` of the peers, which starts with the weights of the peers.
    """
    is_built_in = functions.is_built_in
    device = start_tensorflow(comm, threads, divides_operations=is_built_in)
    config = functions.resolve(config)
    rows = rows_of_rank(config.batch_size, comm.rank, comm.size, config.virtual_ranks)
    division = training.divide_rows(rows, device, is_built_in)
    with tf.Graph().as_default():
        words = ["<eos>", *(f"w{i}" for i in range(1, vocab_size))]  # reset_state needs <eos>
        network = Network(config, vocab_size, functions, words)
        graph = training.build_train_graph(network, comm, division)
        runner = WindowRunner(graph.window, rows, division.num_threads)
        # Like lm.train, finalize the graph and broadcast the weights.
        broadcast = comm.broadcast_variables()
        session = tf.train.SingularMonitoredSession(config=session_config(device)).raw_session()
        session.run(broadcast)
        run = prepare(session)
        weights = tf.trainable_variables()
        shapes = {weight.op.name: weight.shape.as_list() for weight in weights}
        peer_network = network_of(shapes)
        for weight in weights if peer_network else []:
            weight.load(initial_weight(config, weight.op.name, weight.shape), session)

    def step(inputs: np.ndarray, targets: np.ndarray) -> StepResult:
        with functions.one_line_errors(running=True):
            result = training.run_step(run, graph, runner, inputs, targets, config.learning_rate)
        loss = result.nll.nats / config.batch_size
        return StepResult(loss, result.grad_norm, result.exchange_seconds)

    facts = {"device": device.name, "kernels": kernels.description(), "shapes": shapes}
    return step, {**facts, "network": peer_network}


class _TracedRun:
    """A replacement of `session.run` that traces every other call.

    Attributes:
      seconds: The time of each call without a trace.
      traces: The seconds in each traced call, for the name and the type of each operation.
    """

    def __init__(self, session: tf.Session):
        self._session, self._run, self._traces_next = session, SessionCalls(session), False
        self.seconds: list[float] = []
        self.traces: dict[tuple[str, str], list[float]] = defaultdict(list)

    def __call__(self, fetches: Any, feed: Mapping[tf.Tensor, Any]) -> Any:
        is_traced, self._traces_next = self._traces_next, not self._traces_next
        if not is_traced:
            start = time.perf_counter()
            results = self._run(fetches, feed)
            self.seconds.append(time.perf_counter() - start)
            return results
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        metadata = tf.RunMetadata()
        results = self._session.run(fetches, feed, options, metadata)
        for device in metadata.step_stats.dev_stats:
            for node in device.node_stats:
                kind = re.search(r" = (\w+)\(", node.timeline_label)  # "name = Type(inputs)"
                seconds = (node.op_end_rel_nanos - node.op_start_rel_nanos) / 1e9
                self.traces[node.node_name, kind[1] if kind else "other"].append(seconds)
        return results


def measure_trace(
    config: Config,
    functions: NetworkFunctions,
    ids: np.ndarray,
    vocab_size: int,
    threads: int,
    comm: Communicator,
) -> dict[str, Any]:
    """Return the median seconds of a step, of its call of the session, and of each operation."""
    runs: list[_TracedRun] = []

    def prepare(session: tf.Session) -> _TracedRun:
        runs.append(_TracedRun(session))
        return runs[0]

    step, facts = build_step(config, functions, vocab_size, threads, comm, prepare)
    rows = rows_of_rank(config.batch_size, comm.rank, comm.size)
    batches = TrainBatches(ids, config.batch_size, config.num_steps, rows)
    seconds = []
    for index in range(2 * (_UNTIMED_STEPS + _TRACED_STEPS)):
        start = time.perf_counter()
        step(*batches.window(index))
        seconds.append(time.perf_counter() - start)
    return {
        "kernels": facts["kernels"],
        "step_seconds": statistics.median(seconds[2 * _UNTIMED_STEPS :: 2]),
        "session_seconds": statistics.median(runs[0].seconds[_UNTIMED_STEPS:]),
        "operations": [
            (name, kind, statistics.median(times[_UNTIMED_STEPS:]))
            for (name, kind), times in runs[0].traces.items()
        ],
    }


def measure_gemm(precision: str, threads: int, comm: Communicator) -> dict[str, float]:
    """Return the `flops_per_second` of the fastest product of two large square matrices."""
    sessions = session_config(start_tensorflow(comm, threads))
    with tf.Graph().as_default(), tf.Session(config=sessions) as session:
        values = tf.cast(tf.random.uniform([2, _GEMM_SIZE, _GEMM_SIZE]), precision)
        # Use variables, because TensorFlow computes a product of constants only once.
        a, b = (tf.Variable(matrix) for matrix in tf.unstack(values))
        product_op = tf.matmul(a, b).op  # fetching the op does not copy the result to Python
        session.run(tf.global_variables_initializer())
        seconds = [_seconds(session, product_op) for _ in range(_GEMM_PRODUCTS)]
    return {"flops_per_second": 2 * _GEMM_SIZE**3 / min(seconds)}


def measure_products(
    config: Config, vocab_size: int, threads: int, comm: Communicator
) -> dict[str, list[list]]:
    """Time the three products of the output layer of this program and of TensorFlow, in turn.

    Return by the name of the product: sizes M, K and N, our seconds, and TensorFlow's seconds.
    """
    tokens, hidden = config.batch_size * config.num_steps, config.hidden_size
    sessions = session_config(start_tensorflow(comm, threads))
    if not kernels.available():
        raise UserError(f"`products` measures compiled operations; {kernels.description()}")
    with tf.Graph().as_default(), tf.Session(config=sessions) as session:
        shapes = [tokens, hidden], [hidden, vocab_size], [tokens, vocab_size]
        variables = [tf.Variable(tf.random.uniform(shape, -0.1, 0.1)) for shape in shapes]
        # oneDNN's bfloat16 product needs bfloat16 factors, and also rounds the result.
        rounded = [tf.Variable(tf.cast(v.initial_value, config.precision)) for v in variables]
        ops = []
        for factors, product in (
            (variables, lambda a, b: kernels.matmul(a, b, config.precision)),
            (rounded, tf.matmul),
        ):
            inputs, weights, gradient = map(tf.convert_to_tensor, factors)
            logits = product(inputs, weights)
            gradients = tf.gradients(logits, [weights, inputs], gradient)
            ops.append([tensor.op for tensor in (logits, *gradients)])
        session.run(tf.global_variables_initializer())
        sizes = {
            "logits": [tokens, hidden, vocab_size],
            "gradient of the weights": [hidden, tokens, vocab_size],
            "gradient of the inputs": [tokens, vocab_size, hidden],
        }
        results = {}
        for name, *pair in zip(sizes, *ops):
            rounds = [[_seconds(session, op) for op in pair] for _ in range(_PRODUCTS)]
            results[name] = [sizes[name], *map(list, zip(*rounds[_UNTIMED_PRODUCTS:]))]
    return results


def measure_exchange(
    message_bytes: Sequence[int], threads: int, comm: Communicator
) -> dict[str, float]:
    """Time allreduces that start at the same time.

    Return the mean seconds on the slowest rank. `full` is for messages of these sizes, and `empty`
    is for the same number of messages of the smallest size.
    """
    sessions = session_config(start_tensorflow(comm, threads))
    means = {}
    with tf.Graph().as_default(), tf.Session(config=sessions) as session:
        for plan, sizes in (("full", message_bytes), ("empty", [4] * len(message_bytes))):
            buffers = [tf.Variable(tf.zeros([size // 4])) for size in sizes]
            # Do not use tf.group, because TensorFlow's optimizer would remove the exchanges.
            sum_ops = [
                comm.sum(tf.identity(buffer), f"exchange_{plan}_{index}").op
                for index, buffer in enumerate(buffers)
            ]
            session.run([buffer.initializer for buffer in buffers])
            seconds = [_seconds(session, sum_ops) for _ in range(_UNTIMED_EXCHANGES + _EXCHANGES)]
            means[plan] = max(comm.gather(statistics.fmean(seconds[_UNTIMED_EXCHANGES:])))
    return means


def _seconds(session: tf.Session, fetches: Any) -> float:
    start = time.perf_counter()
    session.run(fetches)
    return time.perf_counter() - start
