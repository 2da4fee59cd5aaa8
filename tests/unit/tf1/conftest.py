"""A fixture that writes TF 1.x modules and a config file that loads them, and shared helpers."""

import importlib.util

import pytest
import tensorflow.compat.v1 as tf

from lm.config_file import load_config_file
from lm.model.context import Context
from lm.model.network import Network
from lm.model.variables import operations_behind
from lm.tf1.call import inform_once, warn_once
from tests.unit.model.networks import V

needs_tf_slim = pytest.mark.skipif(
    not importlib.util.find_spec("tf_slim"), reason="run_scripts/setup.sh --dev installs tf_slim"
)

CONFIG = """
from lm import tf1
from lm.config import Config

model = tf1.load("{path}")

def get_config():
    return Config(name="mine", hidden_size=4, num_steps=5, batch_size=4)

def build_outputs(inputs_TB, state, context):
    return model.build(context.embed(inputs_TB), context.training), {{}}
"""


@pytest.fixture
def load(tmp_path):
    """Return a function that loads a config, which loads the first of some modules."""
    warn_once.cache_clear()  # an earlier test may have caused the same warning
    inform_once.cache_clear()

    def load(config=CONFIG, **modules):
        (tmp_path / "program").mkdir(exist_ok=True)
        for name, text in modules.items():
            (tmp_path / "program" / f"{name}.py").write_text(text)
        first = next(iter(modules), "model")
        (tmp_path / "mine.py").write_text(config.format(path=f"program/{first}.py"))
        return load_config_file(str(tmp_path / "mine.py"))

    return load


def outputs_of(file, step=3):
    """Return the outputs at a training step, or in evaluation (None), and the initial weights."""
    with tf.Graph().as_default(), tf.Session() as session:
        network = Network(file.config, V, file.functions)
        step = None if step is None else tf.constant(step, tf.int64)
        context = Context(file.config, V, num_rows=4, step=step)
        outputs, _ = network.build(tf.ones([5, 4], tf.int32), {}, context)
        assert not [op for op in operations_behind(outputs) if "seed2" in op.node_def.attr]
        session.run(tf.global_variables_initializer())
        weights = session.run({v.op.name: v for v in tf.trainable_variables()})
        return session.run(outputs), weights
