"""Optimizers of TF 1.x programs in build_optimizer."""

import numpy as np
import pytest

from tests.unit.model.networks import needs_tf_keras, train_and_evaluate
from tests.unit.tf1.conftest import CONFIG

pytestmark = needs_tf_keras

WITH_OPTIMIZER = (
    CONFIG
    + """
def build_optimizer(learning_rate, context):
    return model.Momentum(learning_rate)
"""
)
MODEL = """
import re
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_ops, math_ops, state_ops
from tensorflow.python.training import optimizer, training_ops

def build(x, is_training):
    return x * tf.get_variable("w", [4])
"""
WHOLE = """
class Momentum(tf.train.Optimizer):
    def __init__(self, rate):
        super(Momentum, self).__init__(False, "Momentum")
        self.rate = rate

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assignments = []
        for grad, param in grads_and_vars:
            if grad is None or param is None:
                continue
            name = re.match("^(.*):\\\\d+$", param.name).group(1)
            v = tf.get_variable(
                name=name + "/velocity", shape=param.shape.as_list(), dtype=tf.float32,
                trainable=False, initializer=tf.zeros_initializer())
            next_v = tf.multiply(0.9, v) + grad
            assignments.extend([param.assign(param - self.rate * next_v), v.assign(next_v)])
        return tf.group(*assignments, name=name)
"""
OLD = """
class Momentum(optimizer.Optimizer):
    def __init__(self, rate):
        super(Momentum, self).__init__(False, "Momentum")
        self.rate = rate

    def _prepare(self):
        self.rate_t = ops.convert_to_tensor(self.rate, name="rate")

    def _create_slots(self, var_list):
        for v in var_list:
            self._zeros_slot(v, "v", self._name)

    def _apply_dense(self, grad, var):
        v = self.get_slot(var, "v")
        v_t = v.assign(math_ops.cast(0.9, var.dtype.base_dtype) * v + grad)
        var_update = state_ops.assign_sub(var, self.rate_t * v_t)
        return control_flow_ops.group(*[var_update, v_t])

    def _apply_sparse(self, grad, var):
        raise NotImplementedError("Sparse gradient updates are not supported.")
"""


KERNEL = OLD.replace(
    """        v_t = v.assign(math_ops.cast(0.9, var.dtype.base_dtype) * v + grad)
        var_update = state_ops.assign_sub(var, self.rate_t * v_t)
        return control_flow_ops.group(*[var_update, v_t])
""",
    """        return training_ops.apply_momentum(
            var, v, self.rate_t, grad, 0.9, use_locking=self._use_locking).op
""",
)
STOCK = OLD.replace("optimizer.Optimizer", "tf.train.AdagradOptimizer").replace(
    '(False, "Momentum")', "(rate)"
)
STOCK = STOCK.replace(
    'raise NotImplementedError("Sparse gradient updates are not supported.")',
    """v = self.get_slot(var, "v")
        v_t = v.assign(0.9 * v + tf.convert_to_tensor(grad))
        rows = tf.range(tf.shape(var)[0])
        return tf.scatter_update(var, rows, var - self.rate_t * v_t).op""",
)

WITH_STEP = OLD.replace(
    "self.rate_t * v_t",
    "self.rate_t * v_t / tf.to_float(1 + tf.train.get_or_create_global_step())",
)


@pytest.mark.parametrize("size", [2, 4])  # the gradient of the table of 11 words: sparse, dense
def test_optimizers_of_programs_update_the_weights(load, size):
    assert "apply_momentum" in KERNEL and "Adagrad" in STOCK and "scatter" in STOCK
    fields = {"max_grad_norm": 1e9, "batch_size": size, "num_steps": size}
    plain = load(CONFIG, plain=MODEL)
    expected = train_and_evaluate(plain, optimizer="momentum", **fields)
    for name, text in {"whole": WHOLE, "old": OLD, "kernel": KERNEL, "stock": STOCK}.items():
        losses = train_and_evaluate(load(WITH_OPTIMIZER, **{name: MODEL + text}), **fields)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_an_optimizer_may_use_the_global_step(load):
    plain = train_and_evaluate(load(WITH_OPTIMIZER, plain=MODEL + OLD))
    losses = train_and_evaluate(load(WITH_OPTIMIZER, model=MODEL + WITH_STEP))
    assert losses[:2] == plain[:2]  # the step is 0 in the first update
    assert losses[2] > plain[2]
