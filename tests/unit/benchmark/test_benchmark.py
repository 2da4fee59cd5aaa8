"""The arithmetic of the benchmarks: statistics, operation counts, predictions and options."""

import dataclasses
import math
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.compat.v1.graph_util import extract_sub_graph

from lm import kernels
from lm.benchmark import ours, worker
from lm.benchmark.__main__ import parse, run
from lm.benchmark.advise import Part, Predictor, part_of_rank
from lm.benchmark.peer_tensorflow import TutorialGraph
from lm.benchmark.scaling import ScalingOptions, bytes_sent, message_bytes, scaled_config
from lm.benchmark.step_time import NOT_IN_PEERS, StepOptions
from lm.benchmark.turns import paired_ratio, speeds, take_turns
from lm.benchmark.workload import initial_weight, load_words
from lm.config import Config
from lm.data.batches import Rows, rows_of_rank
from lm.distributed.communicator import Communicator
from lm.errors import RunError, UserError
from lm.gemm_peak import flops_per_token
from lm.model.network import Network
from lm.model.windows import build_window_graph
from tests.unit.model.networks import fields_read_by

WITHOUT_FIELD = {  # see `measure`
    "precision", "virtual_ranks", "adaptive_softmax_cutoffs", "adaptive_softmax_factor",
}  # fmt: skip
CONFIG = Config(hidden_size=12, num_layers=3, num_steps=5, batch_size=4)
VOCAB_SIZE = 50


@pytest.mark.parametrize("peer", ["torch", "jax"])
def test_each_field_of_the_network_is_in_the_peers_or_rejected(peer):
    supported = fields_read_by(f"lm/benchmark/peer_{peer}.py", "lm/benchmark/workload.py")
    ignored = fields_read_by("lm/model/**/*.py") - supported - WITHOUT_FIELD - {*NOT_IN_PEERS}
    assert not ignored, f"add {ignored} to NOT_IN_PEERS"


def shapes(config, vocab_size=VOCAB_SIZE):
    """Return the shapes of the built-in network's trainable variables."""
    with tf.Graph().as_default():
        build_window_graph(Network(config, vocab_size), Rows(0, config.batch_size), "eval")
        return {v.op.name: v.shape.as_list() for v in tf.trainable_variables()}


class TestStatistics:
    def test_tasks_take_turns(self, monkeypatch):
        numbers = iter(range(6))
        monkeypatch.setattr(
            worker, "run", lambda tasks, *_: [{"seconds": next(numbers)} for _ in tasks]
        )
        found = take_turns([{"a": None}, {"b": None, "c": None}], StepOptions(repeats=2))
        assert found == {name: {"seconds": [i, i + 3]} for i, name in enumerate("abc")}

    def test_speeds(self):
        found = speeds(6, [1.0, 3.0, 6.0])
        std = pytest.approx(math.sqrt(7))
        assert found == {"tokens_per_second": 2.0, "best": 6.0, "std": std}
        assert speeds(5, [1.0])["std"] is None

    def test_drift_cancels_in_pairs(self):
        drift = np.linspace(1, 9, 20)
        ratio = paired_ratio(3 * drift, 2 * drift, factor=2)
        assert (ratio.value, *ratio.interval) == pytest.approx((3, 3, 3))

    @pytest.mark.parametrize("pairs", [4, 60])
    def test_interval_covers_the_true_ratio_in_95_of_100_cases(self, pairs):
        rng = np.random.default_rng(0)
        covered = 0
        for _ in range(2000):
            times = np.exp(rng.normal(0, 0.1, [2, pairs]))
            low, high = paired_ratio(1.3 * times[0], times[1]).interval
            covered += low <= 1.3 <= high
        assert 0.935 < covered / 2000 < 0.965

    def test_a_single_pair_has_no_interval(self):
        ratio = paired_ratio([3.0], [2.0])
        assert (ratio.value, ratio.interval) == (pytest.approx(1.5), None)


class TestCounts:
    def test_flops_equal_those_of_the_products_in_the_graph(self):
        with tf.Graph().as_default():
            graph = TutorialGraph(CONFIG, VOCAB_SIZE)
            used = extract_sub_graph(graph.train_op.graph.as_graph_def(), [graph.train_op.name])
            names = [node.name for node in used.node if node.op == "MatMul"]
            products = [graph.train_op.graph.get_operation_by_name(name) for name in names]
            assert len(products) == 3 * (CONFIG.num_layers * CONFIG.num_steps + 1)
            num_tokens = CONFIG.batch_size * CONFIG.num_steps
            per_token = flops_per_token(shapes(CONFIG), CONFIG.tie_weights)
            assert sum(map(_flops, products)) == num_tokens * per_token

    def test_published_sizes(self):
        small = Config(hidden_size=200, num_layers=2, num_steps=20, batch_size=20)
        flops = flops_per_token(shapes(small, 10_000), small.tie_weights)
        assert flops / 1e6 == pytest.approx(15.84)
        tied = dataclasses.replace(small, tie_weights=True)
        assert flops_per_token(shapes(tied, 10_000), tied.tie_weights) == flops

    def test_bytes_sent(self):
        assert bytes_sent(1000, 4) == 1500
        assert bytes_sent(1000, 1) == 0

    def test_embedding_gradient_is_exchanged_as_rows_or_dense(self):
        weights = shapes(CONFIG)
        num_bytes = {name: 4 * math.prod(shape) for name, shape in weights.items()}
        dense = dataclasses.replace(CONFIG, batch_size=20)
        assert message_bytes(dense, weights) == list(num_bytes.values())
        # Rows and IDs of 20 tokens, each half as many bytes as an allreduce of this size sends.
        rows = [20 * 12 * 4 // 2, 20 * 4 // 2]
        others = [size for name, size in num_bytes.items() if name != "embedding"]
        assert message_bytes(CONFIG, weights) == [*rows, *others]
        tied = message_bytes(dataclasses.replace(CONFIG, tie_weights=True), weights)
        assert tied == [*rows, num_bytes["embedding"], *others]


def _flops(product):
    inner = product.inputs[0].shape.as_list()[0 if product.get_attr("transpose_a") else 1]
    return 2 * inner * math.prod(product.outputs[0].shape.as_list())


class TestPrediction:
    WEIGHTS = {"embedding": [50, 12], "softmax/weights": [12, 50]}  # noqa: RUF012
    # Any number of micro-batches takes the same time.
    WHOLE = {Part(4, count): 0.1 for count in (8, 4, 2, 1)}  # noqa: RUF012

    def test_exchange_of_four_ranks_by_hand(self):
        predictor = Predictor(CONFIG, self.WEIGHTS, {}, 1e-3, 2e-9, latency=1e-5)
        latency, transfer = predictor.exchange_seconds([8_000_000, 1_000_000], 4)
        assert latency == pytest.approx(1e-3 + 2 * 8 * 1e-5)
        assert transfer == pytest.approx(2 * 0.75 * 9e6 * 2e-9)
        assert predictor.exchange_seconds([8_000_000], 1) == (0, 0)

    def test_speedup(self):
        predictor = Predictor(CONFIG, self.WEIGHTS, {**self.WHOLE, Part(2, 4): 0.06}, 0.04, 0.0)
        strong = predictor.predict("strong", 2)
        assert strong["step_ms"] == pytest.approx(100)
        assert strong["speedup"] == pytest.approx(1.0)
        weak = predictor.predict("weak", 2)
        assert weak["speedup"] == pytest.approx(2 * 0.1 / 0.14)
        alone = predictor.predict("weak", 1)
        assert (alone["speedup"], alone["limit"], strong["limit"]) == (
            1,
            "computation",
            "computation",
        )
        # One pass over the validation text costs a third of a step per token.
        share = 73_760 / 3 / (73_760 / 3 + 929_589)
        assert alone["evaluation_share"] == pytest.approx(share)
        slow = Predictor(CONFIG, self.WEIGHTS, self.WHOLE, 0.2, 0.0, file_operations_per_second=2e4)
        assert slow.predict("weak", 64)["limit"] == "latency"
        assert slow.predict("weak", 64)["start_s"] == pytest.approx(64 * 26_700 / 2e4)

    @pytest.mark.parametrize("virtual_ranks", [None, 2])
    def test_computation_has_the_micro_batches_of_a_rank(self, virtual_ranks):
        config = Config(batch_size=20, virtual_ranks=virtual_ranks)
        for ranks in (1, 2, 4, 8, 16):
            part = part_of_rank(config, ranks)
            measured = rows_of_rank(part.batch_size, 0, 1, part.virtual_ranks)
            # The last rank has no fewer rows than the others.
            real = rows_of_rank(20, ranks - 1, ranks, virtual_ranks or 8)
            assert measured.count == real.count
            assert len(measured.micro_batches) == len(real.micro_batches)
        weak = [part_of_rank(scaled_config(config, "weak", ranks), ranks) for ranks in (1, 2, 16)]
        count = virtual_ranks or 8
        assert weak == [(20, count), (20, count // 2), (20, 1)]

    def test_ranks_that_share_cores_take_turns(self):
        found = [
            Predictor(CONFIG, self.WEIGHTS, self.WHOLE, 0.04, 1e-5, ranks_at_once=cores)
            for cores in (math.inf, 2, 0.5)
        ]
        own, shared, slow = (
            [each.predict("weak", ranks)["step_ms"] for ranks in (1, 2, 4)] for each in found
        )
        assert shared == pytest.approx([own[0], own[1], 2 * own[2]])
        # The measured threads of one rank already shared half a core each.
        assert slow == pytest.approx([own[0], 2 * own[1], 4 * own[2]])

    def test_more_ranks_never_raise_the_efficiency_of_weak_scaling(self):
        predictor = Predictor(CONFIG, self.WEIGHTS, self.WHOLE, 1e-3, 2e-9, latency=1e-5)
        found = [predictor.predict("weak", 2**power)["efficiency"] for power in range(13)]
        assert found == sorted(found, reverse=True)


def test_one_rank_runs_on_the_first_host(monkeypatch, tmp_path):
    """The command may start on a login node with other cores."""
    (tmp_path / "mpirun").write_text('#!/bin/sh\necho "Error: mpirun $*" >&2; exit 1\n')
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    options = ScalingOptions(config="config_test")
    with pytest.raises(RunError, match=r"on 1 rank failed: .*mpirun -np 1 -H a,b "):
        worker.run([worker.Task(CONFIG)], options, "a,b")


def test_products_are_compared_with_products_of_the_same_precision(monkeypatch):
    if not kernels.available():
        pytest.skip("needs the compiled operations")
    timed = []
    monkeypatch.setattr(ours, "_seconds", lambda _, op: timed.append(op) or 1.0)
    for precision in ("float32", "bfloat16"):
        config = dataclasses.replace(CONFIG, precision=precision)
        ours.measure_products(config, VOCAB_SIZE, 1, Communicator())
        onednn = {op.outputs[0].dtype.name for op in timed if op.type == "MatMul"}
        assert onednn == {precision}
        timed.clear()


class TestWorkload:
    def test_word_frequencies_follow_zipf(self):
        ids, vocab_size = load_words(Config(num_steps=35, batch_size=20), None)
        assert vocab_size == 10_000
        assert 0 <= ids.min() and ids.max() < 10_000
        counts = np.bincount(ids, minlength=10_000)
        # ID k has the probability log((k + 2) / (k + 1)) / log(V + 1).
        assert counts[0] / len(ids) == pytest.approx(math.log(2) / math.log(10_001), 0.05)
        assert counts[:10].sum() > counts[100:110].sum() > counts[5000:5010].sum()

    def test_weights_depend_on_the_name_and_the_seed(self):
        first = initial_weight(CONFIG, "a", (3, 4))
        assert first.dtype == np.float32 and np.abs(first).max() <= CONFIG.init_scale
        np.testing.assert_array_equal(first, initial_weight(CONFIG, "a", (3, 4)))
        assert (first != initial_weight(CONFIG, "b", (3, 4))).all()
        other = dataclasses.replace(CONFIG, seed=2)
        assert (first != initial_weight(other, "a", (3, 4))).all()

    def test_tutorial_trains_without_clipping_too(self):
        with tf.Graph().as_default(), tf.Session() as session:
            graph = TutorialGraph(dataclasses.replace(CONFIG, max_grad_norm=math.inf), VOCAB_SIZE)
            weights = tf.trainable_variables()
            session.run(tf.global_variables_initializer())
            words = np.zeros([CONFIG.num_steps, CONFIG.batch_size], np.int32)
            before = session.run(weights)
            state = np.zeros(graph.state_ph.shape)
            feed = {graph.inputs_ph: words, graph.targets_ph: words, graph.state_ph: state}
            session.run(graph.train_op, feed)
            for old, new in zip(before, session.run(weights)):
                assert np.isfinite(new).all() and (old != new).any()


class TestOptions:
    def test_cores_are_divided_by_the_ranks_of_a_host(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
        for ranks, hosts, threads in (("4", None, 2), ("4", "a:2,b:2", 4), ("2,1,2", "a,b", 8)):
            assert ScalingOptions(ranks=ranks, hosts=hosts).threads == threads

    @pytest.mark.parametrize(
        "command, arguments, message",
        [
            ("step", ["--config", ""], "cannot read config ''"),
            ("step", ["--repeats", "0"], "repeats must be at least 1"),
            ("step", ["--hidden_size", "0"], "hidden_size"),
            ("step", ["--peers", "--optimizer", "momentum"], "do not support optimizer"),
            ("step", ["--data_path", "no/such"], "is not a directory"),
            ("scaling", ["--ranks", "two"], "ranks must be positive integers"),
            ("scaling", ["--ranks", "0,1"], "ranks must be positive integers"),
            ("scaling", ["--ranks", "1,21"], "batch_size is 20 but there are 21"),
            ("scaling", ["--hosts", "a:x"], "hosts must be"),
            ("scaling", ["--hosts", "a,b", "--ranks", "1,4"], "a,b have 2 slots, too few for 4"),
            ("scaling", ["--config", "config_gru"], "defines a network"),
            ("advise", ["--ranks", "2"], "Unknown command line flag"),
            ("advise", ["--link_gbps", "0"], "link_gbps"),
        ],
    )
    def test_invalid_flags(self, command, arguments, message, tmp_path):
        with pytest.raises(UserError, match=message):
            parse(["benchmark", *arguments, "--out", str(tmp_path)], command)

    def test_an_unknown_command_is_an_error(self):
        with pytest.raises(UserError, match="'fly' is not one of the commands step, trace"):
            run(["benchmark", "fly"])

    def test_flags_override_the_config(self, tmp_path):
        arguments = ["--config", "config_test", "--batch_size", "7", "--out", str(tmp_path / "new")]
        config, chosen = parse(["benchmark", *arguments], "step")
        assert (config.name, config.batch_size) == ("test", 7)
        assert chosen.repeats == 8
        assert (tmp_path / "new").is_dir()
