"""The average of the weights: its value, and its exchange with the weights."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.checkpoint import store, transfer
from lm.inference.trained_run import open_run
from lm.model import plain
from lm.model.network import Network
from lm.model.sampler import Sampler
from lm.optimize.averaging import Average
from tests.commands import events, train_here


def test_the_average_is_the_mean_and_swaps_exactly_with_the_weights():
    random = np.random.default_rng(0)
    every = random.normal(size=[7, 5, 3]).astype("f")
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("table", [5, 3], use_resource=True)
        tf.get_variable("slot", [2], trainable=False, use_resource=True)
        average = Average()
        stored = {variable.op.name: variable for variable in tf.global_variables()}
        assert set(stored) == {"table", "slot", "table/average"}
        session.run(tf.global_variables_initializer())
        for count, value in enumerate(every, start=1):
            table.load(value, session)
            average.add(session.run, count)
            if count == 1:
                np.testing.assert_array_equal(session.run(stored["table/average"]), value)
        mean = session.run(stored["table/average"])
        np.testing.assert_allclose(mean, every.mean(axis=0), rtol=1e-5, atol=1e-6)
        # The exception simulates a stop signal during the validation.
        with pytest.raises(KeyError), average.in_place(session):
            np.testing.assert_array_equal(session.run(table), mean)
            raise KeyError
        np.testing.assert_array_equal(session.run(table), every[-1])
        np.testing.assert_array_equal(session.run(stored["table/average"]), mean)


def test_the_exponential_moving_average_follows_its_formula():
    every = np.random.default_rng(0).normal(size=[40, 5]).astype("f")
    with tf.Graph().as_default(), tf.Session() as session:
        weight = tf.get_variable("weight", [5], use_resource=True)
        average = Average(ema_decay=0.9)
        session.run(tf.global_variables_initializer())
        expected = np.zeros(5)
        for count, value in enumerate(every, start=1):
            weight.load(value, session)
            average.add(session.run, count)
            decay = min(0.9, (count - 1) / count)  # the mean of the first 10 weights
            expected = decay * expected + (1 - decay) * value
        (stored,) = [v for v in tf.global_variables() if v.op.name == "weight/average"]
        np.testing.assert_allclose(session.run(stored), expected, rtol=1e-5, atol=1e-6)


def test_samples_show_the_average(tmp_path, corpora):
    flags = ["--config=config_test", f"--data_path={corpora}", "--hidden_size=8", "--noeval"]
    flags += ["--ema_decay=0.99", "--max_steps=20", "--sample_every_steps=20"]
    train_here(tmp_path / "run", *flags)
    run = open_run(tmp_path / "run")
    with tf.Graph().as_default(), tf.Session() as session:
        sampler = Sampler(Network(run.config, len(run.tokenizer)), run.tokenizer.eos_id)
        transfer.VariableLoader().load_weights(session, store.find(tmp_path / "run"))
        text = run.tokenizer.decode(sampler.draw(session, (run.config.seed, 20)))
    assert [event["text"] for event in events(tmp_path / "run", "sample")] == [text]


@pytest.mark.parametrize("size", [0, 1, 13, (1 << 17) + 5])  # the last is over two blocks
def test_the_fused_update_equals_three_separate_operations(size):
    if not kernels.available():
        pytest.skip(kernels.description())
    start, weight = np.random.default_rng(size).normal(size=[2, size]).astype("f")
    share = np.float32(1 / 7)
    with tf.Graph().as_default(), tf.Session() as session:
        weight_var = tf.get_variable("weight", initializer=weight, use_resource=True)
        averages = [
            tf.get_variable(name, initializer=start, use_resource=True) for name in ("one", "three")
        ]
        session.run(tf.global_variables_initializer())
        before = averages[0].read_value()
        with tf.control_dependencies([before]):
            added = kernels.add_to_average(averages[0], weight_var, share)
        # A value that was read before the update stays unchanged.
        found, _ = session.run([before, added])
        np.testing.assert_array_equal(found, start)
        session.run(plain.add_to_average(averages[1], weight_var, share))
        one, three = session.run(averages)
        np.testing.assert_array_equal(one, three)
        np.testing.assert_array_equal(one, start + (weight - start) * share)
        # If nothing has read the average, the op updates it in place.
        session.run([kernels.add_to_average(averages[0], weight_var, share)])
        session.run([plain.add_to_average(averages[1], weight_var, share)])
        np.testing.assert_array_equal(*session.run(averages))
        np.testing.assert_array_equal(session.run(weight_var), weight)


def test_averaging_variables_of_different_shapes_is_an_error():
    if not kernels.available():
        pytest.skip(kernels.description())
    with tf.Graph().as_default(), tf.Session() as session:
        three, two = [tf.get_variable(f"of_{n}", [n], use_resource=True) for n in (3, 2)]
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"has shape \[3\], not \[2\]"):
            session.run(kernels.add_to_average(three, two, 0.5))
