"""A fixture that writes TF 1.x modules and a config file that loads them."""

import pytest

from lm.config_file import load_config_file
from lm.tf1.call import warn_once

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

    def load(config=CONFIG, **modules):
        (tmp_path / "program").mkdir(exist_ok=True)
        for name, text in modules.items():
            (tmp_path / "program" / f"{name}.py").write_text(text)
        first = next(iter(modules), "model")
        (tmp_path / "mine.py").write_text(config.format(path=f"program/{first}.py"))
        return load_config_file(str(tmp_path / "mine.py"))

    return load
