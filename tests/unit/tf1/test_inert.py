"""Training parts inside the model code of a TF 1.x program have no effect."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.errors import UserError
from lm.model import decoding
from lm.model.network import Network
from lm.user.network_check import check_network
from tests.unit.model.networks import V, needs_tf_keras, train_and_evaluate
from tests.unit.tf1.conftest import outputs_of

pytestmark = needs_tf_keras

PLAIN = """
import tensorflow as tf

def build(x, is_training):
    return x * tf.get_variable("w", [4])
"""
TRAINING = """
import horovod.tensorflow as hvd
import tensorflow as tf

hvd and hvd.init()
tf.set_random_seed(hvd.rank())

class HookOfProgram(tf.train.SessionRunHook):
    pass

class OwnOptimizer(tf.train.Optimizer):
    def __init__(self):
        super().__init__(False, "own")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return [tf.get_variable(v.op.name + "/mean", v.shape).assign(g) for g, v in grads_and_vars]

def build(x, is_training):
    tf.reset_default_graph()
    tf.set_random_seed(1)
    step = tf.train.get_or_create_global_step()
    same = tf.get_variable("global_step", [], tf.int32, trainable=False)
    tf.assign_add(step, 1)
    step.assign(step.assign_add(1) + step.read_value())
    with tf.Graph().as_default():
        w = tf.get_variable("w", [4])
    y = x * w
    if is_training:
        own_step = tf.Variable(0, name="global_step", trainable=False)
        rate = tf.train.exponential_decay(0.1, own_step, 100, 0.9) + tf.to_float(same)
        new_rate = tf.placeholder(tf.float32, [])
        tf.Variable(0.0, name="rate", trainable=False).assign(new_rate)
        tf.Variable(0, name="calls")
        loss = tf.losses.mean_squared_error(y, tf.zeros_like(y))
        average = tf.train.ExponentialMovingAverage(0.9, own_step)
        optimizer = hvd.DistributedOptimizer(tf.train.AdamOptimizer(rate * hvd.size()))
        train_op = optimizer.minimize(tf.losses.get_total_loss(), global_step=step)
        OwnOptimizer().apply_gradients([(w, w)])
        with tf.control_dependencies([train_op]):
            average.apply(tf.trainable_variables())
        y += 0 * average.average(w)
        tf.summary.scalar("loss", loss)
    saver = tf.train.Saver(tf.global_variables(), max_to_keep=1)
    with tf.Session(config=tf.ConfigProto()) as session:
        session.run(tf.global_variables_initializer())
        tf.summary.FileWriter("never_written", session.graph).add_summary(
            session.run(tf.summary.merge_all()))
        saver.save(session, "never_written/model")
    return y
"""


def test_training_parts_of_a_program_have_no_effect(load, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = train_and_evaluate(load(model=PLAIN))
    file = load(second=TRAINING)
    assert train_and_evaluate(file) == plain
    assert outputs_of(file)[1].keys() == {"embedding", "w"}
    for warning in (
        "second.py, line 34: the collection of tf.losses is not used",
        "the program's AdamOptimizer is not used",
        "the program's OwnOptimizer is not used",
        "second.py, line 40: the program's ExponentialMovingAverage is not used",
    ):
        assert caplog.text.count(warning) == 1
    assert not (tmp_path / "never_written").exists()
    caplog.clear()
    check_network(file.config, V, file.functions)
    assert "computes different results" not in caplog.text


AVERAGE = """
import tensorflow as tf

def build(x, is_training):
    mean = tf.reduce_mean(x, [0, 1])
    average = tf.train.ExponentialMovingAverage(0.9)
    with tf.control_dependencies([average.apply([mean])]):
        y = x - {subtracted}
    tf.summary.histogram("mean", average.average(mean))
    return y
"""


def test_no_result_may_depend_on_the_average_of_a_tensor(load, caplog):
    only_shown = AVERAGE.format(subtracted="mean")
    assert train_and_evaluate(load(shown=only_shown))
    assert "line 7: the program's ExponentialMovingAverage is not used: use tf.l" in caplog.text
    needed = AVERAGE.format(subtracted="(mean if is_training else average.average(mean))")
    with pytest.raises(UserError, match=r"line 8: build_outputs uses .*/average_of_a_tensor"):
        train_and_evaluate(load(needed=needed))


SUMMARIES = (
    PLAIN.replace("return", "y =")
    + """
    tf.summary.scalar("mean", tf.reduce_mean(y))
    tf.summary.merge_all()
    return y
"""
)


def test_summaries_in_a_loop_do_not_reach_the_next_call(load):
    file = load(model=SUMMARIES)
    with tf.Graph().as_default():
        network, words = Network(file.config, V, file.functions), tf.zeros([2, 1], tf.int32)
        decoding.target_log_probs(network, words, words)
        assert decoding.next_word(network, words[0], tf.zeros([1, 0]))


STEP = """
import tensorflow as tf

def build(x, is_training):
    step = tf.to_float(tf.train.get_or_create_global_step())
    return x + step{used}
"""


def test_the_global_step_has_its_value_in_training_only(load):
    file = load(model=STEP.format(used=""))
    first, second = (outputs_of(file, step=step)[0] for step in (3, 5))
    np.testing.assert_allclose(second, first + 2, rtol=1e-5)
    with pytest.raises(UserError, match=r"uses the placeholder .*/global_step_outside_of_training"):
        train_and_evaluate(file)
    only_in_training = STEP.format(used=" if is_training else x")
    assert train_and_evaluate(load(second=only_in_training))


OWN_STEP = """
import tensorflow as tf

def build(x, is_training):
    step = tf.Variable(0, trainable=False)
    y = x * tf.get_variable("w", [4])
    tf.train.AdamOptimizer().minimize(tf.reduce_sum(y), {step})
    return y + {added}
"""


def test_an_update_in_a_condition_has_no_effect(load):
    text = OWN_STEP.format(step="global_step=step", added="0")
    update = "tf.train.AdamOptimizer().minimize(tf.reduce_sum(y), global_step=step)"
    conditional = f"tf.cond(tf.equal(step % 4, 0), lambda: {update}, tf.no_op)"
    assert train_and_evaluate(load(model=text.replace(update, conditional)))


@pytest.mark.parametrize("step", ["step", "global_step=step"])
def test_a_step_without_a_value_causes_a_warning(load, caplog, step):
    warning = "line 7: build_outputs assigns to Variable, but nothing executes this assignment: use"
    assert train_and_evaluate(load(first=OWN_STEP.format(step=step, added="0")))
    assert "nothing executes" not in caplog.text
    assert train_and_evaluate(load(second=OWN_STEP.format(step=step, added="tf.to_float(step)")))
    assert f"{warning} context.step, or in a TF 1.x program a variable with" in caplog.text


def test_the_result_of_a_session_is_an_error(load):
    text = PLAIN.replace('tf.get_variable("w", [4])', "tf.Session().run(x)")
    with pytest.raises(UserError, match=r"tf.Session.run has no effect in a loaded program"):
        train_and_evaluate(load(model=text))
