"""Config files that define the optimizer, or the transformation of the gradients."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.distributed.communicator import Communicator
from lm.errors import UserError
from lm.model.network import Network
from tests.unit.model.networks import GOOD, HEADER, OWN_TABLE, V, train_and_evaluate, train_graph

SGD = """
def build_optimizer(learning_rate, context):
    return tf.train.GradientDescentOptimizer(learning_rate)
"""
CLIPPED = """
def transform_gradients(gradients, context):
    clip = 0.05 / tf.linalg.global_norm(list(gradients.values()))
    return {
        name: tf.IndexedSlices(g.values * clip, g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices) else g * clip
        for name, g in gradients.items()
    }
"""
NOISE = """
def transform_gradients(gradients, context):
    noise = 0.1 * tf.random.stateless_normal([11], context.seed())
    return {**gradients, "softmax/bias": gradients["softmax/bias"] + noise}
"""
OVERRIDDEN = """
class Own(tf.train.GradientDescentOptimizer):
    def compute_gradients(self, *args, **kwargs):
        return super().compute_gradients(*args, **kwargs)
"""
BIAS = 'gradients["softmax/bias"] + noise'
RANDOM = NOISE.replace("stateless_normal([11], context.seed())", "normal([11])")
WITHOUT_STEP = """
class Own(tf.train.GradientDescentOptimizer):
    def apply_gradients(self, gradients, global_step=None, name=None):
        return super().apply_gradients(gradients, None, name)
"""
OWN = SGD.replace("tf.train.GradientDescentOptimizer", "Own")
NETWORK = HEADER + GOOD
RANDOM_CONSTRAINT = OWN_TABLE % ", constraint=lambda w: w + tf.random.normal(w.shape)" + GOOD
RANDOM_UPDATES = pytest.mark.parametrize(
    "text", [NETWORK + RANDOM, RANDOM_CONSTRAINT], ids=["gradients", "constraint"]
)


@pytest.mark.parametrize("functions", [SGD, CLIPPED, SGD + CLIPPED])
def test_the_functions_replace_the_optimizer_and_the_clipping(load, functions):
    fields = {"max_grad_norm": 0.05}
    expected = train_and_evaluate(load(NETWORK), **fields)
    losses = train_and_evaluate(load(NETWORK + functions), **(fields if functions == SGD else {}))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_noise_is_repeatable(load):
    losses = train_and_evaluate(load(NETWORK + NOISE))
    assert losses == train_and_evaluate(load(NETWORK + NOISE)) != train_and_evaluate(load(NETWORK))


@pytest.mark.parametrize(
    "noise",
    [
        "np.random.randn(11)",
        "tf.get_variable('q', [11], initializer=tf.random_normal_initializer(), trainable=False)",
    ],
)
def test_random_constants_and_initial_values_of_an_update_are_repeatable(load, noise):
    text = "import numpy as np\n" + NETWORK + NOISE
    text = text.replace("0.1 * tf.random.stateless_normal([11], context.seed())", noise)
    assert noise in text
    assert train_and_evaluate(load(text)) == train_and_evaluate(load(text))


@pytest.mark.parametrize(
    "functions, fields, message",
    [
        (SGD, {"optimizer": "adam"}, "defines build_optimizer, so optimizer has no effect: remove"),
        (SGD, {"weight_decay": 0.1}, "so weight_decay has no effect"),
        (CLIPPED, {"max_grad_norm": 1.0}, "transform_gradients, so max_grad_norm has no effect"),
        (SGD.replace("tf.train.", "str"), {}, "line 16, in build_optimizer: NameError"),
        (SGD.replace("return", "return 1 #"), {}, "must return a tf.train.Optimizer, not a int"),
        (NOISE.replace("**gradients, ", ""), {}, "dictionary with the same names as its argument"),
        (NOISE.replace(BIAS, "None"), {}, "float32 tensor .* for softmax/bias, not a NoneType"),
        (NOISE.replace(" + noise}", "[:2]}"), {}, r"float32 tensor \(11,\) for softmax/bias, not"),
        (
            OVERRIDDEN + OWN,
            {},
            "compute_gradients of Own is never called, .* use transform_gradients",
        ),
    ],
)
def test_a_mistake_is_one_line(load, functions, fields, message):
    with pytest.raises(UserError, match=message) as error:
        train_and_evaluate(load(NETWORK + functions), **fields)
    assert "\n" not in str(error.value)


@RANDOM_UPDATES
def test_random_numbers_of_the_update_are_reported(load, caplog, text):
    file = load(text)
    with tf.Graph().as_default():
        network = Network(file.config, V, file.functions)
        train_graph(network)
    assert (
        "the update draws random numbers with RandomStandardNormal"
        in network.audit.why_irreproducible
    )
    assert caplog.text.count("RandomStandardNormal") == 1


@RANDOM_UPDATES
def test_random_numbers_of_the_update_are_an_error_on_several_ranks(load, text):
    file, comm = load(text), Communicator()
    comm.size = 2
    with tf.Graph().as_default(), pytest.raises(UserError, match=r"use context.dropout .* diverge"):
        train_graph(Network(file.config, V, file.functions), comm=comm)


def test_an_optimizer_that_ignores_the_global_step_does_not_stop_it(load):
    train_and_evaluate(load(NETWORK + WITHOUT_STEP + OWN))  # it checks the global step
