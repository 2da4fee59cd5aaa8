"""Optimizer updates: clipping, merging rows and the update rules."""

import math

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework.config import disable_op_determinism, enable_op_determinism

from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.optimize.algorithms import OPTIMIZERS
from lm.optimize.gradients import exchange_gradients
from lm.optimize.optimizer import build_update
from tests.machine import in_new_processes

WORDS = [2, 0, 2]


def build(config, loss, rate, step):
    comm = Communicator()
    exchange = exchange_gradients(loss, config.batch_size * config.num_steps, comm)
    return build_update(config, exchange, rate, step, comm)


def one_update(max_grad_norm=math.inf, **fields):
    """Update a zero table once; the loss is the sum of its rows WORDS."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        table = tf.get_variable("table", initializer=np.zeros([4, 2], "f"), use_resource=True)
        loss = tf.reduce_sum(tf.gather(table, WORDS))
        fields = {"batch_size": 1, **fields}
        config = Config(max_grad_norm=max_grad_norm, num_steps=1, **fields)
        step = tf.train.get_or_create_global_step()
        update = build(config, loss, tf.constant(0.5), step)
        session.run(tf.global_variables_initializer())
        norm, _ = session.run([update.grad_norm, update.train_op])
        return graph, norm, session.run(table)


def test_each_optimizer_is_a_choice_and_only_uses_its_settings():
    fields = Config.__dataclass_fields__
    assert fields["optimizer"].metadata["choices"] == (*OPTIMIZERS,)
    for name, optimizer in OPTIMIZERS.items():
        users = f"optimizer {name}"
        own = {setting for setting in fields if fields[setting].metadata["used_by"] == users}
        assert {*optimizer.settings} - {"weight_decay"} == own


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("max_grad_norm", [math.inf, 1e39, 1e38, 100.0, 1.0])
def test_the_norm_is_clipped_unless_its_maximum_exceeds_float32(max_grad_norm):
    _, norm, table = one_update(max_grad_norm)
    assert norm == pytest.approx(math.sqrt(2 * 4 + 2 * 1))
    gradient = np.array([[1, 1], [0, 0], [2, 2], [0, 0]])
    expected = -0.5 * gradient * min(1, max_grad_norm / float(norm))
    np.testing.assert_allclose(table, expected, rtol=1e-6)


@pytest.mark.usefixtures("implementation")
def test_rows_are_merged_on_the_cpu_in_a_fixed_order():
    """A GPU would add rows atomically in any order, and the ranks would diverge."""
    graph = one_update()[0]
    merging = [op for op in graph.get_operations() if op.type in ("Unique", "UnsortedSegmentSum")]
    assert len(merging) == 2
    assert {tf.DeviceSpec.from_string(op.device).device_type for op in merging} == {"CPU"}


@pytest.mark.parametrize("batch_size, is_sparse", [(7, True), (8, False)])
def test_a_gradient_is_sparse_while_its_rows_are_smaller_than_the_table(batch_size, is_sparse):
    """The table has 4 rows. An allreduce moves each of them twice."""
    graph, norm, table = one_update(batch_size=batch_size)
    assert any(op.type == "Unique" for op in graph.get_operations()) == is_sparse
    assert norm == pytest.approx(math.sqrt(2 * 4 + 2 * 1))
    np.testing.assert_array_equal(table[:, 0], [-0.5, 0, -1, 0])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_only_the_rows_of_the_batch_are_computed(optimizer):
    """With a large vocabulary, a step must not process the whole table."""
    graph = one_update(optimizer=optimizer)[0]
    update = [op for op in graph.get_operations() if op.name.startswith("update")]
    whole = [op.name for op in update for tensor in op.outputs if tensor.shape == [4, 2]]
    assert not whole
    types = {op.type for op in graph.get_operations()}
    assert types & {"ResourceScatterAdd", "ResourceSparseApplyAdagradV2"}
    assert not types & {"ResourceApplyGradientDescent", "ResourceApplyAdagradV2"}


def test_the_exchange_is_not_timed_if_tensorflow_rejects_the_clock():
    """Users enable this on GPUs."""
    enable_op_determinism()
    try:
        with tf.Graph().as_default(), tf.Session() as session:
            weight = tf.get_variable("weight", initializer=1.0, use_resource=True)
            exchange = exchange_gradients(weight * 2, 1, Communicator())
            session.run(tf.global_variables_initializer())
            assert session.run([exchange.seconds, exchange.gradients]) == [0.0, [2.0]]
    finally:
        disable_op_determinism()


BATCHES = [[2, 0, 2], [0, 0, 0], [2, 2, 3]]  # row 1 is never used; row 3 is used last
RATE, NORM = 0.5, 2.0


def gradients():
    """Yield the clipped gradient of (step + 1) times the sum of the rows of each batch."""
    for step, words in enumerate(BATCHES):
        gradient = np.zeros([4, 2])
        np.add.at(gradient, words, step + 1.0)
        yield gradient * min(1, NORM / np.linalg.norm(gradient))


def momentum_rule(weights, config):
    """Update weights like torch.optim.SGD with momentum and weight decay."""
    velocity = 0.0
    for gradient in gradients():
        velocity = config.momentum * velocity + gradient + config.weight_decay * weights
        weights = weights - RATE * velocity
    return weights


def adagrad_rule(weights, config):
    """Update weights by equation 1 of Duchi et al. (2011), with an initial sum."""
    total = config.adagrad_initial_value
    for gradient in gradients():
        gradient = gradient + config.weight_decay * weights
        total = total + gradient**2
        weights = weights - RATE * gradient / np.sqrt(total)
    return weights


def rmsprop_rule(weights, config):
    """Update weights like TF 1.x, whose mean of squared gradients starts at 1."""
    mean = 1.0
    for gradient in gradients():
        gradient = gradient + config.weight_decay * weights
        mean = config.rmsprop_decay * mean + (1 - config.rmsprop_decay) * gradient**2
        weights = weights - RATE * gradient / np.sqrt(mean + config.rmsprop_epsilon)
    return weights


def adam_rule(weights, config):
    """Update weights by algorithm 1 of Kingma & Ba (2015), with the decay of AdamW."""
    mean = square = 0.0
    beta1, beta2 = config.adam_beta1, config.adam_beta2
    for t, gradient in enumerate(gradients(), start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        root = np.sqrt(square / (1 - beta2**t))
        step = mean / (1 - beta1**t) / (root + config.adam_epsilon)
        weights = weights - RATE * config.weight_decay * weights - RATE * step
    return weights


@pytest.mark.parametrize(
    "rule, fields",
    [
        (momentum_rule, {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.1}),
        (momentum_rule, {"optimizer": "momentum"}),
        (momentum_rule, {"optimizer": "momentum", "momentum": 0.5, "weight_decay": 0.1}),
        (adagrad_rule, {"optimizer": "adagrad"}),
        (adagrad_rule, {"optimizer": "adagrad", "adagrad_initial_value": 1.0}),
        (adagrad_rule, {"optimizer": "adagrad", "weight_decay": 0.1}),
        (rmsprop_rule, {"optimizer": "rmsprop"}),
        (rmsprop_rule, {"optimizer": "rmsprop", "rmsprop_decay": 0.5, "rmsprop_epsilon": 0.1}),
        (rmsprop_rule, {"optimizer": "rmsprop", "weight_decay": 0.1}),
        (adam_rule, {"optimizer": "adam", "adam_beta2": 0.98, "adam_epsilon": 0.3}),
        (
            adam_rule,
            {"optimizer": "adam", "adam_beta1": 0.0, "adam_beta2": 0.9, "weight_decay": 0.1},
        ),
    ],
)
def test_updates_follow_the_papers_even_for_unused_rows(rule, fields):
    config = Config(max_grad_norm=NORM, batch_size=1, num_steps=1, **fields)
    start = np.arange(8, dtype="f").reshape(4, 2) / 4
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("table", initializer=start, use_resource=True)
        words_ph = tf.placeholder(tf.int32, [3])
        step = tf.train.get_or_create_global_step()
        loss = tf.cast(step + 1, tf.float32) * tf.reduce_sum(tf.gather(table, words_ph))
        update = build(config, loss, tf.constant(RATE), step)
        session.run(tf.global_variables_initializer())
        for words in BATCHES:
            session.run(update.train_op, {words_ph: words})
        np.testing.assert_allclose(session.run(table), rule(start, config), rtol=2e-5, atol=2e-6)
        assert session.run(step) == 3


@pytest.mark.parametrize("is_sparse", [False, True])
def test_adagrad_rounds_like_numpy(is_sparse):
    """CPUs have different approximations of 1 / sqrt(x), and the ranks' weights would differ."""
    start, factors = np.random.default_rng(1).normal(size=(2, 50, 100)).astype("f")
    fields = {"max_grad_norm": math.inf, "batch_size": 1, "num_steps": 1}
    config = Config(optimizer="adagrad", adagrad_initial_value=0.5, **fields)
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("table", initializer=start, use_resource=True)
        rows = tf.gather(table, np.arange(50)) if is_sparse else tf.identity(table)
        loss = tf.reduce_sum(rows * factors)
        update = build(config, loss, tf.constant(RATE), tf.train.get_or_create_global_step())
        session.run(tf.global_variables_initializer())
        session.run(update.train_op)
        expected = start - factors * np.float32(RATE) / np.sqrt(np.float32(0.5) + factors**2)
        np.testing.assert_array_equal(session.run(table), expected)


def updated(optimizer, threads):
    """Return all variables after three updates, for an odd size and subnormal numbers."""
    random = np.random.default_rng(1)
    scale = 10.0 ** random.integers(-44, 3, size=300_007)
    start, gradient = (random.normal(size=300_007) * scale).astype("f"), scale.astype("f")
    config = Config(optimizer=optimizer, weight_decay=0.1, max_grad_norm=math.inf)
    setup = tf.ConfigProto(intra_op_parallelism_threads=threads)
    with tf.Graph().as_default(), tf.Session(config=setup) as session:
        weights = tf.get_variable("weights", initializer=start, use_resource=True)
        step = tf.train.get_or_create_global_step()
        loss = tf.reduce_sum(weights * gradient)
        update = build(config, loss, tf.constant(0.1), step)
        session.run(tf.global_variables_initializer())
        for _ in range(3):
            session.run(update.train_op)
        return [value.tobytes() for value in session.run(tf.global_variables())]


def updated_by_all(threads):
    return {optimizer: updated(optimizer, threads) for optimizer in OPTIMIZERS}


def test_an_update_is_bitwise_identical_for_any_number_of_threads():
    """Ranks may have different numbers of threads."""
    first, *others = in_new_processes(updated_by_all, [(threads,) for threads in (1, 2, 3)])
    for found in others:
        assert [name for name in OPTIMIZERS if found[name] != first[name]] == []
