"""Loading modules of TF 1.x programs without edits."""

import hashlib
import importlib.util
import shutil

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import array_ops
from tensorflow.python.platform import tf_logging

from lm.config_file import load_config_file
from lm.errors import UserError
from lm.record import CorpusRecord, RunRecord, first_difference
from tests.unit.model.networks import needs_tf_keras, train_and_evaluate
from tests.unit.tf1.conftest import CONFIG

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
needs_tf_slim = pytest.mark.skipif(
    not importlib.util.find_spec("tf_slim"), reason="run_scripts/setup.sh --dev installs tf_slim"
)


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


def test_a_program_with_packages_is_imported_from_its_root(load, tmp_path):
    (tmp_path / "program" / "models").mkdir(parents=True)
    main = (
        "import utils\nfrom models.base import scale\nimport base\n\ndef build(x, is_training):\n"
    )
    main += "    assert list(xrange(2)) == [0, 1]\n    return utils.tf.identity(base.scale(x))\n"
    (tmp_path / "program/models/model.py").write_text(main)
    base = "import tensorflow as tf\nfrom . import other\n\ndef scale(x):\n"
    (tmp_path / "program/models/base.py").write_text(
        base + "    return x * tf.get_variable('w', [4])\n"
    )
    (tmp_path / "program/models/other.py").write_text("")
    config = CONFIG.replace('"{path}"', '"program/models/model.py", root="program"')
    file = load(config, utils="import tensorflow as tf\n")
    assert train_and_evaluate(file)
    names = {"utils.py", "models/model.py", "models/base.py", "models/other.py"}
    assert file.functions.loaded.keys() == {f"program/{name}" for name in names}
    with pytest.raises(UserError, match=r"program/utils\.py is not in the directory other"):
        load(config.replace("models/model.py", "utils.py").replace('="program"', '="other"'))


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "tf.contrib.cudnn_rnn.CudnnLSTM(1, 4)",
            "tf.contrib.cudnn_rnn.CudnnLSTM does not exist in TensorFlow 2; use tf.nn.rnn_cell",
        ),
        ("tf.contrib.crf", "tf.contrib.crf does not exist in TensorFlow 2; use stock operations"),
        ("tf.get_variable('global_step', [])", "variable global_step belongs to the trainer"),
        ("from tensorflow.contrib.opt import X", "contrib.opt.X .*; use the flag --optimizer"),
        ("import layers", "layers.py is imported in a function: move it to the top"),
    ],
)
def test_what_does_not_exist_is_one_line(load, line, message):
    text = f"import tensorflow as tf\n\ndef build(x, is_training):\n    {line}\n    return x\n"
    with pytest.raises(UserError, match=rf"model.py, line 4, in build_outputs: .*{message}"):
        train_and_evaluate(load(model=text, layers="X = 1\n"))


def test_a_missing_file_is_one_line(load):
    with pytest.raises(UserError, match=r"mine.py, line 5: tf1.load cannot find .*model.py; give"):
        load()


def test_a_changed_file_changes_the_run(load):
    def record():
        corpus = CorpusRecord("text", "", "")
        return RunRecord({}, "", corpus, load(model=MODEL, layers=LAYERS).functions.file_record)

    before = record()
    loaded = {**before.config_file.loaded, "program/layers.py": "0"}
    config_file = type(before.config_file)("mine.py", before.config_file.sha256, loaded)
    after = RunRecord({}, "", before.corpus, config_file)
    assert first_difference(before, record()) is None
    assert first_difference(before, after).file == "program/layers.py"
    assert first_difference(before, after, files_may_differ=True) is None


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


CELLS = """
import tensorflow as tf
from tensorflow.python.ops import rnn_cell

def build(x, is_training):
    cells = [tf.contrib.rnn.LSTMBlockCell(4), rnn_cell.GRUCell(4)]
    cell = tf.nn.rnn_cell.MultiRNNCell(cells)
    return tf.nn.dynamic_rnn(cell, x, None, None, tf.float32, None, False, True)[0]
"""
SLIM = """
import tensorflow as tf
import tensorflow.contrib.slim as slim
from tensorflow.contrib.framework import add_arg_scope

def build(x, is_training):
    x = tf.contrib.layers.layer_norm(x, begin_norm_axis=-1)
    x = slim.fully_connected(x, 6, weights_initializer=tf.contrib.layers.xavier_initializer())
    w = tf.get_variable("w", [4], initializer=tf.contrib.layers.xavier_initializer())
    return tf.layers.dense(x, 4, kernel_regularizer=None) * w
"""


LOSSES = """
import tensorflow as tf

def build(x, is_training):
    logits, targets = tf.random.stateless_normal([3, 5, 7], [1, 2]), tf.zeros([3, 5], tf.int32)
    weights = tf.constant([[1., 0., 1., 1., 0.]] * 3)
    total = tf.contrib.seq2seq.sequence_loss(logits, targets, weights)
    by_step = tf.contrib.seq2seq.sequence_loss(
        logits, targets, weights, average_across_timesteps=False)
    by_example = tf.contrib.legacy_seq2seq.sequence_loss_by_example(
        tf.unstack(logits, axis=1), tf.unstack(targets, axis=1), tf.unstack(weights, axis=1))
    losses = -tf.nn.log_softmax(logits)[..., 0] * weights
    close = [
        tf.debugging.assert_near(total, tf.reduce_sum(losses) / 9),
        tf.debugging.assert_near(by_step, tf.reduce_sum(losses, 0) / 3),
        tf.debugging.assert_near(by_example, tf.reduce_sum(losses, 1) / 3),
    ]
    with tf.control_dependencies(close):
        return tf.identity(x)
"""


OLD_ORDERS = """
import tensorflow as tf
from tensorflow.python.ops import array_ops

def build(x, is_training):
    tf.scalar_summary("mean", tf.reduce_mean(x))
    logits, labels = tf.random.stateless_normal([3, 7], [1, 2]), tf.constant([1, 0, 6])
    probabilities, log_p = tf.one_hot(labels, 7), tf.nn.log_softmax(logits)
    losses = tf.nn.softmax_cross_entropy_with_logits(logits, probabilities)
    close = [
        tf.debugging.assert_near(losses, -tf.reduce_sum(probabilities * log_p, 1)),
        tf.debugging.assert_near(
            losses, tf.nn.sparse_softmax_cross_entropy_with_logits(logits, labels)),
        tf.debugging.assert_near(
            tf.nn.sigmoid_cross_entropy_with_logits(logits, probabilities),
            -tf.log_sigmoid(logits * (2 * probabilities - 1))),
        tf.debugging.assert_equal(tf.concat(0, tf.split(0, 5, x)), tf.concat(tf.split(x, 5, 0), 0)),
        tf.debugging.assert_equal(array_ops.concat(0, array_ops.split(0, 5, x)), x),
        tf.debugging.assert_equal(array_ops.pack(array_ops.unstack(x)), x),
    ]
    with tf.control_dependencies(close):
        return tf.identity(x)
"""
DECODER = """
import tensorflow as tf
from tensorflow.contrib import legacy_seq2seq
from tensorflow.python.ops.rnn_cell import _linear
from tensorflow.python.util import nest

def build(x, is_training):
    assert nest.is_sequence([x]) and not nest.is_sequence(x)
    x = tf.stack([_linear([y, y], 4, True, scope=f"step_{i}") for i, y in enumerate(tf.unstack(x))])
    cell = tf.nn.rnn_cell.BasicRNNCell(4)
    steps, start = tf.unstack(x), cell.zero_state(x.shape[1], tf.float32)
    outputs, last = legacy_seq2seq.rnn_decoder(steps, start, cell)
    expected, expected_last = tf.nn.static_rnn(cell, steps, start)
    looped, _ = legacy_seq2seq.rnn_decoder(steps, start, cell, lambda output, step: steps[step])
    close = [
        tf.debugging.assert_equal(outputs, expected),
        tf.debugging.assert_equal(outputs, looped),
        tf.debugging.assert_equal(last, expected_last),
    ]
    with tf.control_dependencies(close):
        return tf.stack(outputs)
"""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(OLD_ORDERS, id="old_orders"),
        pytest.param(DECODER, marks=needs_tf_keras, id="decoder"),
        pytest.param(CELLS, marks=needs_tf_keras, id="cells"),
        pytest.param(SLIM, marks=[needs_tf_keras, needs_tf_slim], id="layers"),
        pytest.param(LOSSES, id="losses"),
    ],
)
def test_functions_of_old_versions(load, text):
    losses = train_and_evaluate(load(model=text))
    assert losses[-1] < losses[0]


WHOLE = """
import tensorflow as tf

def build(x, is_training):
    y = x * tf.get_variable("w", [4])
    calls = tf.Variable(0, name="calls", trainable=False)
    rate = tf.Variable(0.0, name="rate", trainable=False)
    if is_training:
        tf.assign(rate, tf.placeholder(tf.float32, [], name="new_rate"))
        weights = tf.trainable_variables()
        gradients, _ = tf.clip_by_global_norm(tf.gradients(tf.reduce_sum(y), weights), 5)
        tf.train.ProximalAdagradOptimizer(rate).apply_gradients(zip(gradients, weights))
    return y + tf.cast(calls, tf.float32)
"""


def test_the_optimizer_of_a_program_is_ignored_with_a_warning(load, caplog):
    losses = train_and_evaluate(load(model=WHOLE))
    assert losses[-1] < losses[0]
    assert "the program's ProximalAdagradOptimizer is not used: set --optimizer" in caplog.text


SHARED_CELL = """
import tensorflow as tf

def build(x, is_training):
    cell = tf.nn.rnn_cell.MultiRNNCell([tf.nn.rnn_cell.BasicRNNCell(4)] * 2)
    return tf.nn.dynamic_rnn(cell, x, dtype=tf.float32, time_major=True)[0]
"""


@needs_tf_keras
def test_a_cell_in_two_layers_causes_a_warning(load, caplog):
    tf_logging._log_counter_per_token.clear()  # TensorFlow warns only once per process
    tf.logging.set_verbosity(tf.logging.ERROR)  # like a command
    train_and_evaluate(load(model=SHARED_CELL))
    assert "the same object and will share weights" in caplog.text
    assert "deprecated" not in caplog.text


def test_replaced_functions_belong_to_a_program(load):
    replaced = "model.tf.layers.dense = model.array_ops.reshape = lambda x: x\n"
    text = "import tensorflow as tf\nfrom tensorflow.python.ops import array_ops\n\n"
    text += "def build(x, is_training):\n    return tf.layers.dense(array_ops.reshape(x))\n"
    before = tf.layers.dense, array_ops.reshape
    train_and_evaluate(load(CONFIG + replaced, model=text))
    assert (tf.layers.dense, array_ops.reshape) == before
