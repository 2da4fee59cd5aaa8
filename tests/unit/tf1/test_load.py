"""Loading modules of TF 1.x programs without edits."""

import hashlib
import shutil
import sys
import traceback

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import array_ops

import lm.user.failures
from lm.config_file import load_config_file
from lm.errors import UserError
from lm.record import CorpusRecord, RunRecord, first_difference
from lm.user.code import place
from tests.unit.model.networks import train_and_evaluate
from tests.unit.tf1.conftest import CONFIG, needs_tf_slim

MODEL = """
from __future__ import division
import numpy as np
import tensorflow as tf
import tensorflow.contrib.rnn as rnn
from tensorflow.contrib.training import HParams
from tensorflow.python.ops import array_ops
import layers
from layers import units_of

flags = tf.app.flags
flags.DEFINE_integer("width", 3, "units of the hidden layer")
FLAGS = flags.FLAGS

def build(x, is_training):
    hps = HParams(width=FLAGS.width)
    hidden = layers.dense(x, hps.width * units_of(x), "hidden")
    return tf.pack([array_ops.identity(h) for h in tf.unpack(tf.nn.relu(hidden))])
"""
LAYERS = """
import tensorflow as tf
from absl import flags

flags.DEFINE_bool("bias", True, "")

def units_of(x):
    return x.shape[-1].value

def dense(x, units, scope):
    with tf.variable_scope(scope):
        weights = tf.get_variable("w", [x.get_shape()[-1], units])
        y = tf.tensordot(x, weights, 1)
        return y + tf.Variable(tf.zeros([units]), name="b") if flags.FLAGS.bias else y
"""


def test_an_unedited_program_trains(load):
    file = load(model=MODEL, layers=LAYERS)
    losses = train_and_evaluate(file)
    assert losses[-1] < losses[0]
    sources = {"program/model.py": MODEL, "program/layers.py": LAYERS}
    checksums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sources.items()}
    assert file.functions.loaded == file.functions.file_record.loaded == checksums
    assert isinstance(tf.TensorShape([3])[0], int)  # TF 1.x behavior is limited to the functions


def test_programs_do_not_share_modules_or_flags(load, tmp_path):
    load(model=MODEL, layers=LAYERS)
    layers = "import tensorflow as tf\ntf.flags.DEFINE_integer('width', 5, '')\n"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model.py").write_text("import layers\nfrom tensorflow import flags\n")
    (tmp_path / "other/layers.py").write_text(layers)
    config = CONFIG + 'other = tf1.load("other/model.py")\nmodel.FLAGS.width = 4\n'
    file = load(config, model=MODEL, layers=LAYERS)
    assert "other/layers.py" in file.functions.loaded
    modules = file.functions.by_name["build_outputs"].__wrapped__.__globals__
    assert (modules["model"].FLAGS.width, modules["other"].flags.FLAGS.width) == (4, 5)


PACKAGE = {
    "utils.py": "import tensorflow as tf\n",
    "models/model.py": """
import utils
from models.base import scale
import base

def build(x, is_training):
    assert list(xrange(2)) == [0, 1]
    return utils.tf.identity(base.scale(x))
""",
    "models/base.py": """
import tensorflow as tf
from . import other

def scale(x):
    return x * tf.get_variable('w', [4])
""",
    "models/other.py": "",
}


def test_a_program_with_packages_is_imported_from_its_root(load, tmp_path):
    (tmp_path / "program" / "models").mkdir(parents=True)
    for name, text in PACKAGE.items():
        (tmp_path / "program" / name).write_text(text)
    config = CONFIG.replace('"{path}"', '"program/models/model.py", root="program"')
    file = load(config)
    assert train_and_evaluate(file)
    assert file.functions.loaded.keys() == {f"program/{name}" for name in PACKAGE}
    with pytest.raises(UserError, match=r"program/utils\.py is not in the directory other"):
        load(config.replace("models/model.py", "utils.py").replace('="program"', '="other"'))


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "tf.contrib.cudnn_rnn.CudnnLSTM(1, 4)",
            "tf.contrib.cudnn_rnn.CudnnLSTM does not exist in TensorFlow 2; use tf.nn.rnn_cell",
        ),
        (
            "tf.contrib.crf.crf_decode(x)",
            "tf.contrib.crf.crf_decode does not exist in TensorFlow 2; use stock operations",
        ),
        (
            "from tensorflow.contrib.opt.python.training import X; X(1)",
            "contrib.opt.python.training.X .*; use the flag --optimizer",
        ),
        ("tf.estimator.Estimator(x)", "tf.estimator.Estimator .*; use python -m lm.train"),
        ("tf.estimator.RunConfig()", "tf.estimator.RunConfig does not exist"),
        ("x if 1 == tf.contrib.tpu.KEY else x", "tf.contrib.tpu.KEY does not exist"),
        (
            "import no_package",
            r"No module named 'no_package'; .*stubs=\('no_package',\) to tf1.load",
        ),
        ("tf.one_hot([1], 4 / 2)", "of type 'float'.*; in Python 3, / returns a float; write //"),
        (
            "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[[1, 2]], logits=[1.0, 2.0])",
            "ValueError: `labels.shape.rank`",
        ),
        ("import layers", "layers.py is imported in a function: move it to the top"),
    ],
)
def test_what_does_not_exist_is_one_line(load, line, message):
    text = f"import tensorflow as tf\n\ndef build(x, is_training):\n    {line}\n    return x\n"
    with pytest.raises(UserError, match=rf"model.py, line 4, in build_outputs: .*{message}"):
        train_and_evaluate(load(model=text, layers="X = 1\n"))


IMPORTS = """
import argparse
import collections
import inspect
import numpy as np
import tensorflow as tf
import tensorflow.contrib.some.deep.path as deep
from collections import Mapping, OrderedDict
from no_package.part import used
from past.builtins import xrange
from tensorflow.contrib.rnn.python.ops import core_rnn_cell
from tensorflow.python.ops import control_flow_ops, functional_ops, rnn_cell
from tensorflow.python.ops.rnn_cell_impl import _LayerRNNCell
try:
    from tensorflow.python.ops.rnn_cell_impl import _Linear
    assert False, "programs catch this ImportError"
except ImportError:
    pass

import no_package
import old_cells
import shared

print("loading")
assert not vars(argparse.ArgumentParser().parse_known_args()[0])
assert vars(argparse.ArgumentParser().parse_args()) == {}
assert tf.before == "ran" and core_rnn_cell.BasicRNNCell is rnn_cell.BasicRNNCell
assert inspect.getargspec(lambda a, b=1: a).args == ["a", "b"]
assert np.zeros(2, np.float).dtype == np.float64 and np.random.rand(2).shape == (2,)
assert isinstance(OrderedDict(), Mapping) and not isinstance(unicode(), collections.Mapping)
try:
    import no_other_package
except ImportError:
    pass

class Hook(tf.estimator.SessionRunHook, no_package.Base):
    pass

class Scale(_LayerRNNCell):
    state_size = output_size = 4

    def build(self, shape):
        self.w = self.add_variable("w", [4])

    def call(self, x, state):
        return x * self.w, state

def model_fn(x, mode):
    for keys in (tf.estimator.ModeKeys, tf.contrib.learn.ModeKeys):
        assert (mode == keys.TRAIN) != (mode == keys.EVAL)
    variable = tf.Variable(1.0)
    assert isinstance(variable, (tf.Tensor, tf.Variable)) and not isinstance(x, tf.Variable)
    assert isinstance(x.graph, tf.Graph)
    return tf.estimator.EstimatorSpec(mode, predictions=x, loss=None)

@no_package.decorator
def build(x, is_training):
    print("building")
    assert not isinstance(x, deep.Cell) and list(xrange(2)) == [0, 1]
    x = control_flow_ops.cond(tf.constant(True), lambda: x, lambda: 2 * x)
    x = functional_ops.map_fn(lambda row: row, x)
    scaled, _ = Scale()(tf.reshape(x, [-1, 4]), tf.zeros([1, 4]))
    x = tf.reshape(scaled, [x.shape[0], -1, 4])
    mode = tf.estimator.ModeKeys.TRAIN if is_training else tf.estimator.ModeKeys.EVAL
    return shared.scale(model_fn(x, mode).predictions)
"""


def test_old_names_and_missing_packages_can_be_imported(load, tmp_path, capsys):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/shared.py").write_text(
        "import tensorflow as tf\n\ndef scale(x):\n    return x * tf.get_variable('w', [4])\n"
    )
    (tmp_path / "lib/old_cells.py").write_text("import part_of_an_old_tensorflow\n")
    config = CONFIG.replace(
        '"{path}"',
        '"{path}", root=("lib", "program"), stubs=("no_package", "old_cells"), before=prepare',
    ).replace(
        "from lm.config import Config",
        "from lm.config import Config\n\ndef prepare(tf):\n    tf.before = 'ran'\n",
    )
    file = load(config, model=IMPORTS)
    assert file.functions.loaded.keys() == {"program/model.py", "lib/shared.py"}
    assert train_and_evaluate(file)
    printed = capsys.readouterr()
    assert not printed.out and {"loading", "building"} <= set(printed.err.split())


def test_python_2_is_one_line_with_a_hint(load):
    with pytest.raises(UserError, match=r"model.py, line 1: Missing .*; this is Python 2: convert"):
        load(model="print 'old'\n")


def test_a_missing_file_is_one_line(load):
    with pytest.raises(UserError, match=r"mine.py, line 5: .*model.py is not at .*; give"):
        load()


def test_an_edited_program_is_not_trained_from_memory(load, tmp_path):
    load(model=MODEL, layers=LAYERS)
    (tmp_path / "program/layers.py").write_text(LAYERS + "# edited\n")
    with pytest.raises(UserError, match=r"program/layers.py has changed since .*: restart Python"):
        load_config_file(str(tmp_path / "mine.py"))


def test_a_removed_flag_has_no_effect(load):
    width = "\nmodel.FLAGS.width = 5\n\ndef get_config"
    for config, units in [(CONFIG.replace("\ndef get_config", width), 5), (CONFIG, 3)]:
        load(config, model=MODEL, layers=LAYERS)
        module = next(m for n, m in reversed(sys.modules.items()) if n.endswith(".model"))
        assert module.FLAGS.width == units


def test_a_changed_file_changes_the_run(load):
    def record():
        corpus = CorpusRecord("text", "", "")
        return RunRecord({}, "", corpus, load(model=MODEL, layers=LAYERS).functions.file_record)

    before = record()
    loaded = {**before.config_file.loaded, "program/layers.py": "0"}
    config_file = type(before.config_file)("mine.py", before.config_file.sha256, loaded)
    after = RunRecord({}, "", before.corpus, config_file)
    assert first_difference(before, record()) is None
    assert first_difference(before, after) == "program/layers.py"
    assert first_difference(before, after, files_may_differ=True) is None
    config_file = type(before.config_file)("mine.py", before.config_file.sha256, {})
    assert first_difference(before, RunRecord({}, "", before.corpus, config_file)) is None


def test_a_copied_config_file_finds_copies_of_its_files(load, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mine.py").write_text(CONFIG.format(path="../program/model.py"))
    load(model=MODEL, layers=LAYERS)  # writes the program
    file = load_config_file(str(tmp_path / "deep" / "mine.py"))
    search = tmp_path / "search"
    search.mkdir()
    shutil.copy(file.path, search / "config.py")
    file.loaded.copy_to(str(search))
    shutil.rmtree(tmp_path / "program")
    assert file.loaded.is_copied_to(str(search))
    copy = load_config_file(str(search / "config.py"))
    assert copy.functions.loaded == file.functions.loaded
    assert {"../program/model.py", "../program/layers.py"} == copy.functions.loaded.keys()
    assert train_and_evaluate(copy)


@needs_tf_slim
def test_replaced_functions_belong_to_a_program(load):
    replaced = "model.tf.layers.dense = model.array_ops.reshape = lambda x: x\n"
    replaced += "model.tf.contrib.layers.dense = model.tf.contrib.opt.Adam = lambda x: 2 * x\n"
    text = "import tensorflow as tf\nfrom tensorflow.python.ops import array_ops\n\n"
    text += "def build(x, is_training):\n    x = tf.layers.dense(array_ops.reshape(x))\n"
    text += "    return tf.contrib.layers.dense(tf.contrib.opt.Adam(x))\n"
    before = tf.layers.dense, array_ops.reshape
    train_and_evaluate(load(CONFIG + replaced, model=text))
    assert (tf.layers.dense, array_ops.reshape) == before


def test_an_order_that_works_is_not_hinted_at(load):
    text = "import tensorflow as tf\n\ndef build(x, is_training):\n"
    with pytest.raises(UserError, match=r"model.py, line 4, .* no attribute 'nothing'$"):
        train_and_evaluate(load(model=text + "    return tf.concat(0, [x, x]) + tf.nothing\n"))


def test_a_failed_gradient_names_the_line_of_its_operation(load):
    text = "import tensorflow as tf\n\ndef build(x, is_training):\n"
    text += "    w = tf.get_variable('w', [2, 2])\n    return x + tf.linalg.det(0.0 * w)\n"
    with pytest.raises(UserError, match=r"model.py, line 5: InvalidArgumentError: .*invertible"):
        train_and_evaluate(load(model=text))


def test_lines_of_compiled_packages_are_not_lines_of_the_user(tmp_path):
    config = tmp_path / "mine.py"
    names = (lm.user.failures.__file__, "call"), (str(config), "build"), ("package/fast.pyx", "run")
    frames = [traceback.FrameSummary(path, 7, name, line="") for path, name in names]
    assert place(str(config), frames) == f"{config}, line 7"
