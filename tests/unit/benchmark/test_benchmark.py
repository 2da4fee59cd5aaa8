"""The benchmarks' arithmetic: statistics, operations counted, predictions; no measurements."""

import dataclasses
import math
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.benchmark import exchange, options
from lm.benchmark.messages import Message, messages_of_step
from lm.benchmark.peers.tensorflow import TutorialGraph
from lm.benchmark.prediction import HostCosts, Link, Predictor, fit_host_costs, predict_exchange
from lm.benchmark.statistics import fit_line, paired_ratio, summarize
from lm.benchmark.workers.workload import initial_weight, load_words
from lm.config import Config
from lm.data.batches import Rows
from lm.errors import UserError
from lm.model.network import Network
from lm.model.shape import step_flops, weight_shapes
from lm.model.windows import build_window_graph

CONFIG = Config(hidden_size=12, num_layers=3, num_steps=5, batch_size=4)
VOCAB_SIZE = 50


class TestStatistics:
    def test_summary(self):
        assert summarize([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7)), 2.0)
        assert summarize([5.0]) == (5.0, 0.0, 5.0)

    def test_drift_cancels_in_pairs(self):
        drift = np.linspace(1, 9, 20)
        ratio = paired_ratio(3 * drift, 2 * drift)
        assert ratio == pytest.approx((1.5, 1.5, 1.5))

    def test_interval_by_hand(self):
        # logs 0 and 2: mean 1, standard error 1, t for one degree of freedom 12.706
        ratio = paired_ratio([1.0, math.exp(2)], [1.0, 1.0])
        assert ratio == pytest.approx((math.e, math.exp(1 - 12.706), math.exp(1 + 12.706)))

    @pytest.mark.parametrize("pairs", [4, 12, 60])
    def test_interval_covers_the_truth_95_times_in_100(self, pairs):
        rng = np.random.default_rng(0)
        covered = 0
        for _ in range(2000):
            times = np.exp(rng.normal(0, 0.1, [2, pairs]))
            low, high = paired_ratio(1.3 * times[0], times[1])[1:]
            covered += low <= 1.3 <= high
        assert 0.935 < covered / 2000 < 0.965

    def test_a_single_pair_tells_nothing_about_the_spread(self):
        assert paired_ratio([3.0], [2.0]) == pytest.approx((1.5, 0.0, math.inf))

    def test_line(self):
        points = [(x, 2e-3 + 3e-9 * x) for x in (4, 1e3, 1e6, 1e8)]
        assert fit_line(points) == pytest.approx((2e-3, 3e-9))
        assert fit_line([(1, 1.0), (2, 0.9)]).slope == 0
        assert fit_line([(1, 1.0), (2, 2.5)]).intercept == 0


class TestArithmetic:
    def test_shapes_are_those_of_the_graph(self):
        with tf.Graph().as_default():
            build_window_graph(Network(CONFIG, VOCAB_SIZE), Rows(0, 4), "eval")
            found = {v.op.name: tuple(v.shape.as_list()) for v in tf.trainable_variables()}
        assert weight_shapes(CONFIG, VOCAB_SIZE) == found

    def test_flops_are_those_of_the_products_in_the_graph(self):
        with tf.Graph().as_default():
            graph = TutorialGraph(CONFIG, VOCAB_SIZE)
            products = [op for op in _ancestors(graph.train_op) if op.type == "MatMul"]
            assert len(products) == 3 * (CONFIG.num_layers * CONFIG.num_steps + 1)
            assert sum(map(_flops, products)) == step_flops(CONFIG, VOCAB_SIZE)

    def test_the_peers_train_without_a_clip_too(self):
        with tf.Graph().as_default(), tf.Session() as session:
            graph = TutorialGraph(dataclasses.replace(CONFIG, max_grad_norm=math.inf), VOCAB_SIZE)
            weights = tf.trainable_variables()
            session.run(tf.global_variables_initializer())
            words = np.zeros([CONFIG.num_steps, CONFIG.batch_size], np.int32)
            before = session.run(weights)
            session.run(graph.train_op, {graph.inputs_ph: words, graph.targets_ph: words})
            for old, new in zip(before, session.run(weights)):
                assert np.isfinite(new).all() and (old != new).any()

    def test_published_sizes(self):
        small = Config(hidden_size=200, num_layers=2, num_steps=20, batch_size=20)
        assert step_flops(small, 10_000) / 400 / 1e6 == pytest.approx(15.84)
        tied = dataclasses.replace(small, tie_weights=True)
        assert step_flops(tied, 10_000) == step_flops(small, 10_000)

    def test_bytes_sent(self):
        assert Message("allreduce", 1000).bytes_sent(4) == 1500
        assert Message("allgather", 1000).bytes_sent(4) == 750
        assert Message("allreduce", 1000).bytes_sent(1) == 0

    def test_the_embedding_goes_sparse_or_dense(self):
        sparse = messages_of_step(CONFIG, VOCAB_SIZE)
        assert [m.bytes for m in sparse if m.collective == "allgather"] == [4 * 5 * 12 * 4, 80]
        dense = messages_of_step(dataclasses.replace(CONFIG, batch_size=20), VOCAB_SIZE)
        assert {m.collective for m in dense} == {"allreduce"}
        floats = sum(math.prod(shape) for shape in weight_shapes(CONFIG, VOCAB_SIZE).values())
        # And one message of the loss and three requests.
        assert sum(message.bytes for message in dense) == 4 * (floats + 4)
        tied = dataclasses.replace(CONFIG, tie_weights=True, embedding_size=7)
        messages = messages_of_step(tied, VOCAB_SIZE)
        assert [m.bytes for m in messages if m.collective == "allgather"] == [4 * 5 * 7 * 4, 80]
        assert Message("allreduce", VOCAB_SIZE * 7 * 4) in messages


def _ancestors(*ops):
    found, stack = set(), list(ops)
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return found


def _flops(product):
    inner = product.inputs[0].shape.as_list()[0 if product.get_attr("transpose_a") else 1]
    return 2 * inner * math.prod(product.outputs[0].shape.as_list())


class TestPrediction:
    COSTS = HostCosts(fixed=1e-3, per_message=1e-4, per_byte_sent=1e-9)
    MESSAGES = (Message("allreduce", 8_000_000), Message("allgather", 2_000_000))

    def test_one_rank_exchanges_nothing(self):
        assert predict_exchange(self.MESSAGES, 1, self.COSTS, Link()) == 0

    def test_four_ranks_by_hand(self):
        link = Link(latency=1e-5, seconds_per_byte=1e-9)
        seconds = predict_exchange(self.MESSAGES, 4, self.COSTS, link)
        negotiation = 2 * (2 * 2 * 1e-5)
        hops = (2 * 2 + 3) * 1e-5
        sent = 2 * 0.75 * 8e6 + 0.75 * 2e6
        assert seconds == pytest.approx(1e-3 + 2e-4 + negotiation + hops + sent * 2e-9)

    def test_costs_are_recovered_from_what_they_predict(self):
        sent = sum(message.bytes_sent(2) for message in self.MESSAGES)
        empty = Message("allreduce", 0)
        times = [
            predict_exchange(messages, 2, self.COSTS, Link())
            for messages in ([empty], [empty] * 2, self.MESSAGES)
        ]
        assert fit_host_costs(*times, 2, sent) == pytest.approx(self.COSTS)

    def test_noise_makes_no_negative_costs(self):
        assert min(fit_host_costs(2e-3, 1e-3, 5e-4, 10, 1e6)) >= 0

    def test_speedup(self):
        compute = {4: 0.1, 2: 0.06}
        predictor = Predictor(CONFIG, VOCAB_SIZE, compute, HostCosts(0.04, 0.0, 0.0))
        strong = predictor.predict(2, "strong", Link())
        assert strong["step_ms"] == pytest.approx(100)
        assert strong["speedup"] == pytest.approx(1.0)
        weak = predictor.predict(2, "weak", Link())
        assert weak["speedup"] == pytest.approx(2 * 0.1 / 0.14)
        assert predictor.predict(1, "weak", Link())["speedup"] == 1.0

    def test_more_ranks_never_raise_weak_efficiency(self):
        predictor = Predictor(CONFIG, VOCAB_SIZE, {4: 0.1}, self.COSTS)
        link = Link(latency=1e-5, seconds_per_byte=1e-9)
        found = [predictor.predict(2**power, "weak", link)["efficiency"] for power in range(13)]
        assert found == sorted(found, reverse=True)


class TestWorkload:
    def test_words_are_as_frequent_as_zipf_says(self):
        words = load_words(Config(num_steps=35), 20, None)
        assert words.vocab_size == 10_000
        assert 0 <= words.ids.min() and words.ids.max() < 10_000
        counts = np.bincount(words.ids, minlength=10_000)
        # Id k has the probability log((k + 2) / (k + 1)) / log(V + 1).
        assert counts[0] / len(words.ids) == pytest.approx(math.log(2) / math.log(10_001), 0.05)
        assert counts[:10].sum() > counts[100:110].sum() > counts[5000:5010].sum()

    def test_weights_depend_on_the_name_and_the_seed(self):
        first = initial_weight(CONFIG, "a", (3, 4))
        assert first.dtype == np.float32 and np.abs(first).max() <= CONFIG.init_scale
        np.testing.assert_array_equal(first, initial_weight(CONFIG, "a", (3, 4)))
        assert (first != initial_weight(CONFIG, "b", (3, 4))).all()
        other = dataclasses.replace(CONFIG, seed=2)
        assert (first != initial_weight(other, "a", (3, 4))).all()


class TestOptions:
    def test_ranks(self):
        assert options.parse_ranks("4,1,2,2") == [1, 2, 4]
        for text in ("", "1,", "0,1", "two"):
            with pytest.raises(UserError, match="ranks must be"):
                options.parse_ranks(text)

    def test_cores_are_shared_by_the_ranks_of_a_host(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
        for ranks, hosts, threads in ((4, None, 2), (4, "a:2,b:2", 4), (2, "a,b", 8)):
            assert options.ExchangeOptions(ranks=ranks, hosts=hosts).threads == threads

    @pytest.mark.parametrize(
        "kind, arguments, message",
        [
            (options.StepOptions, ["--repeats", "0"], "repeats must be at least 1"),
            (options.StepOptions, ["--hidden_size", "0"], "hidden_size"),
            (
                options.StepOptions,
                ["--peers", "--optimizer", "adam", "--weight_decay", "0.1"],
                "the peers compute without optimizer, weight_decay: leave out --peers",
            ),
            (options.StepOptions, ["--ranks", "2"], "Unknown command line flag"),
            (options.ScalingOptions, ["--ranks", "1,21"], "batch_size is 20 but there are 21"),
            (options.ScalingOptions, ["--hosts", "a:x"], "hosts must be"),
            (options.ExchangeOptions, ["--ranks", "1"], "ranks must be at least 2"),
            (options.ExchangeOptions, ["--max_mb", "0"], "max_mb"),
            (options.AdviceOptions, ["--ranks", "1"], "largest of ranks"),
            (options.AdviceOptions, ["--link_gbps", "0"], "link_gbps"),
        ],
    )
    def test_bad_flags(self, kind, arguments, message, tmp_path):
        with pytest.raises(UserError, match=message):
            options.parse(["benchmark", *arguments, "--out", str(tmp_path)], kind)

    def test_each_command_has_its_own_defaults(self, tmp_path):
        def parsed(kind, *arguments):
            return options.parse(["benchmark", *arguments, "--out", str(tmp_path)], kind)

        config, step = parsed(options.StepOptions, "--config", "config_test", "--batch_size", "7")
        assert (config.name, config.batch_size) == ("test", 7)
        assert (step.repeats, step.rank_counts, step.hosts) == (10, [1], None)
        advice = parsed(options.AdviceOptions, "--ranks", "4,1", "--intra_op_threads", "3")[1]
        assert (advice.repeats, advice.rank_counts, advice.threads) == (5, [1, 4], 3)

    def test_a_directory_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").touch()
        out = str(tmp_path / "file" / "x")
        with pytest.raises(UserError, match="cannot make the directory"):
            options.parse(["benchmark", "--out", out], options.StepOptions)

    def test_message_sizes(self):
        assert exchange.message_sizes(0.02) == [4, 1024, 4096, 16384]
