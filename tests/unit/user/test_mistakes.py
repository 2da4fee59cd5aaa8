"""Mistakes in networks of config files are reported in one line."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import logger
from lm.errors import UserError, short_message
from lm.model.decoding import target_log_probs
from lm.model.network import Network
from lm.user.network_check import check_network
from tests.unit.model.networks import CLASSIC, GOOD, HEADER, SCOPED, V, train_and_evaluate

MISTAKES = {
    "    return x\n": "must return (outputs, new_state), not a tensor of shape (5, 3, 4)",
    "    return tf.transpose(x, [1, 0, 2]), {'h': x[-1]}\n":
        "outputs must have the shape (5, 3, any), not (3, 5, 4)",
    "    return tf.cast(x, tf.float64), {'h': x[-1]}\n": "outputs must be float32, not float64",
    "    return x, {}\n": "new_state has [], but state_shapes has ['h']",
    "    return x, {'h': x}\n": "new_state['h'] must have the shape (3, 4), not (5, 3, 4)",
    "    x *= tf.get_variable('w', [4])\n    x += tf.get_variable('w', [4])\n" + GOOD:
        "line 14, in build_outputs: variable w is created twice: use a separate",
    "    x = tf.map_fn(lambda row: tf.matmul(row, row), x)\n" + GOOD:
        "line 13, in build_outputs: ValueError: Dimensions must be equal",
    "    return x, {'h': None}\n": "new_state['h'] must be a tensor, not a NoneType",
    "    with tf.variable_scope('state'):\n        x *= tf.get_variable('h', [4])\n" + GOOD:
        "line 14: build_outputs has the variable state/h, a name of the recurrent state in a",
    "    w = tf.get_variable('w', [4], tf.float64)\n" + GOOD: "variable w is float64",
    "    w = tf.get_variable('w', [0, 4])\n" + GOOD:
        "line 13, in build_outputs: variable w has the shape (0, 4): the number of elements must",
    "    w = tf.get_variable('w', initializer='a', trainable=False)\n" + GOOD:
        "line 13, in build_outputs: variable w is string, not one of bool, uint8, int8, int32",
    "    w = tf.Variable(tf.zeros([4]))\n" + GOOD:
        "line 13: build_outputs creates train/lm_network/Variable again at each call: use tf.get",
    "    w = tf.get_variable('w', [4]) if context.training else 0.0\n    x += w\n" + GOOD:
        "uses the variable w in some calls only",
    "    with tf.variable_scope('softmax'):\n        x += tf.get_variable('bias', [4])\n" + GOOD:
        "line 14: build_outputs has the variable softmax/bias, a name of the output layer: rename",
    "    x *= tf.placeholder(tf.float32, [])\n" + GOOD:
        "line 13: build_outputs uses the placeholder train/lm_network/Placeholder, which receives",
    "    x = tf.recompute_grad(lambda x: context.dropout(x, 0.5))(x)\n" + GOOD:
        "context.dropout is called again for the gradient, as tf.recompute_grad does",
    "    context.penalize(*2 * [tf.transpose(x, [1, 0, 2])])\n" + GOOD:
        "must be [T, B, H] with 3 rows, not (3, 5, 4) and (3, 5, 4)",
    "    return tf.sparse.from_dense(x), {'h': x[-1]}\n": "must be a tensor, not a SparseTensor",
    "    x = context.dropout(x, 1.5)\n" + GOOD: "keep_prob must be above 0 and at most 1, not 1.5",
    "    tf.add_to_collection(tf.GraphKeys.LOSSES, tf.nn.l2_loss(x))\n" + GOOD:
        "adds to the collection losses, which is not used: use context.add_loss",
    "    context.add_loss(x[0])\n" + GOOD: "context.add_loss needs a float32 scalar, not",
    "    start = tf.lookup.KeyValueTensorInitializer([1], [2], tf.int32, tf.int32)\n"
    "    table = tf.lookup.StaticHashTable(start, 0)\n"
    "    x *= tf.cast(table.lookup(inputs_TB), tf.float32)[:, :, None]\n" + GOOD:
        "which is not used: use tf.gather from a constant instead of a lookup table",
    "    x += tf.cast(tf.train.range_input_producer(5).dequeue(), tf.float32)\n" + GOOD:
        "line 13: build_outputs reads a queue or a tf.data iterator",
    "    words = tf.data.make_one_shot_iterator(tf.data.Dataset.range(5))\n"
    "    x += tf.cast(words.get_next(), tf.float32)\n" + GOOD:
        "line 14: build_outputs reads a queue or a tf.data iterator",
    "    n = tf.get_variable('n', [], initializer=tf.ones_initializer(), trainable=False)\n"
    "    with tf.control_dependencies([n.assign_add(1.0)]):\n"
    "        x *= n\n" + GOOD:
        "line 14: build_outputs assigns to a variable (train/lm_network/AssignAddVariableOp)",
    "    n = tf.get_variable('n', [], initializer=tf.ones_initializer(), trainable=False)\n"
    "    with tf.control_dependencies([] if context.training else [n.assign_add(1.0)]):\n"
    "        x *= n\n" + GOOD: "assigns to a variable (eval/lm_network/AssignAddVariableOp)",
    "    n = tf.get_variable('n', [], initializer=tf.ones_initializer(), trainable=False)\n"
    "    x = tf.scan(lambda h, x: h + x * n.assign_add(1.0), x, state['h'])\n" + GOOD:
        "assigns to a variable (",
    "    w = tf.get_variable('w', [4])\n"
    "    with tf.control_dependencies([w.initializer]):\n"
    "        x *= w\n" + GOOD: "line 13: build_outputs assigns to a variable (w/Assign)",
    "    x *= tf.cast(tf.train.get_or_create_global_step(), tf.float32)\n" + GOOD:
        "line 13: build_outputs uses the global step, which exists only in training: use context.",
    "    w = tf.get_variable('w', [4, 4])\n"
    "    step = lambda h, x: h + tf.matmul(x, context.drop_weights(w, 0.5))\n"
    "    x = tf.scan(step, x, state['h'])\n" + GOOD:
        "line 14, in build_outputs: context.drop_weights is for weights and outputs of all time",
    "    x *= tf.get_variable('train', [4])\n" + GOOD:
        "line 13, in build_outputs: variable train has the name of an operation of the trainer",
    "    w = tf.get_variable('w', [4])\n"
    "    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, w.assign_add(x[0, 0]))\n"
    "    x *= w\n" + GOOD:
        "line 14: build_outputs adds train/lm_network/AssignAddVariableOp to UPDATE_OPS, which",
    "    print('no such cell'); exit()\n" + GOOD: "mine.py, line 13, in build_outputs: SystemExit",
    "    tf.set_random_seed(7)\n" + GOOD: "sets TensorFlow's seed: remove it",
    # The number of rows is only known in a run.
    "    rows = tf.reshape(x, [-1, 4])\n"
    "    return x, {'h': tf.boolean_mask(rows, rows[:, 0] < 9)}\n":
        "[15,4] is not compatible with expected shape [3,4]",
    "    x += tf.gather(state['h'], inputs_TB + 9)\n" + GOOD:
        "mine.py, line 13: InvalidArgumentError: indices[",
    "    y = tf.py_func(lambda words: {}[int(words[0, 0])], [inputs_TB], tf.float32)\n"
    "    x *= tf.ensure_shape(y, [])\n" + GOOD:
        "mine.py, line 13: UnknownError: KeyError: ",
    "    x = tf.function(lambda row: context.dropout(row, 0.5))(x)\n" + GOOD:
        "context.dropout is called in a tf.function, whose calls",
}  # fmt: skip


@pytest.mark.parametrize("body", MISTAKES, ids=[text[:40] for text in MISTAKES.values()])
def test_a_mistake_is_one_line(load, body):
    with pytest.raises(UserError) as error:
        train_and_evaluate(load(HEADER + body))
    assert MISTAKES[body] in str(error.value) and "\n" not in str(error.value)


LOGITS = HEADER.replace("outputs", "logits").replace("inputs_TB)\n", "inputs_TB, 11)\n")
OTHER = HEADER.replace("inputs_TB)\n", "inputs_TB, name='words')\n")
CONSTANT = HEADER.replace("outputs", "logits").replace(
    "context.embed(inputs_TB)", "tf.one_hot(inputs_TB, context.vocab_size)"
)
TOP = HEADER.replace("\ndef get_config", "SCALE = tf.constant([2.0])\n\ndef get_config", 1)
STATE_ONLY = "    return x, {'h': state['h']}\n"
TAKEN = "    x += tf.get_variable('%s', [4])\n" + GOOD


@pytest.mark.parametrize(
    "text, fields, message",
    [
        (LOGITS + STATE_ONLY, {"tie_weights": True}, "builds its own output layer, so"),
        (OTHER + GOOD, {"tie_weights": True}, "table of context.embed(inputs_TB), not none"),
        (
            SCOPED + "    with tf.variable_scope('b'):\n        context.embed(inputs_TB)\n" + GOOD,
            {"tie_weights": True},
            "not a/embedding, b/embedding: give the other tables a name",
        ),
        (LOGITS + STATE_ONLY, {"adaptive_softmax_cutoffs": "4"}, "define build_outputs"),
        (HEADER + GOOD, {"adaptive_softmax_cutoffs": "4,11"}, "are beyond the vocabulary"),
        (
            HEADER + GOOD,
            {"adaptive_softmax_cutoffs": "4", "tie_weights": True},
            "tie_weights with adaptive_softmax_cutoffs needs adaptive_input",
        ),
        (
            OTHER + GOOD,
            {"adaptive_softmax_cutoffs": "4", "adaptive_input": True},
            "adaptive_input needs exactly one table of context.embed(inputs_TB), not none",
        ),
        (
            HEADER + TAKEN % "softmax/cluster_0/words",
            {"adaptive_softmax_cutoffs": "4"},
            "softmax/cluster_0/words",
        ),
        (CONSTANT + STATE_ONLY, {}, "mine.py: ValueError: No variables to optimize"),
        (HEADER + TAKEN % "embedding/Adam", {"optimizer": "adam"}, "mine.py: ValueError: "),
        (
            HEADER + "    context.dropout(tf.transpose(x, [1, 0, 2]), 0.5)\n" + GOOD,
            {"locked_dropout": True},
            "locked_dropout needs [T, B, ...], not [3, 5, 4]",
        ),
        (TOP + "    x *= SCALE\n" + GOOD, {}, "create tensors inside the function"),
        (HEADER + GOOD, {"activation_penalty": 2.0}, "does not call context.penalize"),
        (HEADER + GOOD, {"recurrent_keep_prob": 0.5}, "does not call context.drop_weights"),
    ],
    ids=["logits", "no table", "two tables", "logits and cutoffs", "cutoffs",
         "tied and cutoffs", "no bands", "cluster's name", "no variables", "adam's name",
         "lock", "top", "penalty", "weight-drop"],
)  # fmt: skip
def test_incompatible_settings_are_one_line(load, text, fields, message):
    with pytest.raises(UserError) as error:
        train_and_evaluate(load(text), **fields)
    assert message in str(error.value) and "\n" not in str(error.value)


PYTHON = "tf.py_func(lambda x: x, [x], tf.float32, stateful=%s)"
PENALTY = "    context.penalize(x, x + tf.random.normal(tf.shape(x)))\n"


@pytest.mark.parametrize(
    "body, warning",
    [
        (PENALTY, "line 13: build_outputs draws random numbers with RandomStandardNormal"),
        (
            f"    x += tf.ensure_shape({PYTHON % True}, x.shape)\n",
            "line 13: build_outputs runs Python code (PyFunc)",
        ),
        (f"    x += tf.ensure_shape({PYTHON % False}, x.shape)\n", ""),
    ],
    ids=["numbers in a penalty", "Python", "stateless Python"],
)
def test_results_that_may_not_be_reproducible_are_one_warning(load, caplog, body, warning):
    fields = {"activation_penalty": 1.0} if body == PENALTY else {}
    train_and_evaluate(load(HEADER + body + GOOD), **fields)
    found = [r.getMessage() for r in caplog.records if r.name == logger.name]
    assert len([m for m in found if "mine.py" in m]) == bool(warning)
    assert warning in "".join(found)


def test_a_variable_without_a_gradient_is_a_warning(load, caplog):
    train_and_evaluate(load(HEADER + "    tf.get_variable('w', [4])\n" + GOOD))
    assert "the loss does not depend on w, which keeps its value" in caplog.text


@pytest.mark.parametrize(
    "body, warning",
    [
        ("    w.assign(tf.placeholder(tf.float32, [4]))\n    x *= w\n", "line 14: build_outputs"),
        ("    tf.assign(w, tf.clip_by_norm(w, 3.0))\n    x *= w\n", "line 14: build_outputs"),
        ("    w[0].assign(x[0, 0, 0])\n    x *= w\n", "line 14: build_outputs"),
        (
            "    tf.assign(w, 0.9 * w + 0.1 * x[0, 0])\n"
            "    x *= x[0, 0] if context.training else w\n",
            "line 14: build_outputs",
        ),
        ("    w.assign(tf.placeholder(tf.float32, [4]))\n", ""),
        ("    tf.add_to_collection('update_ops', w.assign(x[0, 0]))\n    x *= w\n", ""),
    ],
    ids=["value", "constraint", "slice", "average for evaluation", "unused variable", "update"],
)
def test_an_assignment_that_nothing_executes_is_a_warning(load, caplog, body, warning):
    start = "    w = tf.get_variable('w', [4], trainable=False)\n"
    train_and_evaluate(load(HEADER + start + body + GOOD))
    expected = "assigns to w, but nothing executes this assignment"
    assert caplog.text.count(f"{warning} {expected}") == bool(warning)
    assert (f"{expected}: use initializer=" in caplog.text) == bool(warning)


@pytest.mark.parametrize("unused", ["tf.global_variables_initializer()", "w.assign(0.5 * w)"])
def test_an_unused_operation_does_not_change_the_weights_in_a_loop(load, unused):
    start = f"    w = tf.get_variable('w', [4])\n    {unused}\n    x *= w\n"
    file = load(HEADER + start + GOOD)
    with tf.Graph().as_default(), tf.Session() as session:
        words = tf.zeros([3, 1], tf.int32)
        log_probs = target_log_probs(Network(file.config, V, file.functions), words, words)
        weights = tf.trainable_variables()
        session.run(tf.global_variables_initializer())
        session.run([variable.assign(variable + 1.0) for variable in weights])
        before = session.run(weights)
        session.run(log_probs)
        np.testing.assert_equal(session.run(weights), before)


@pytest.mark.parametrize("seed", ["None", "1"])
def test_random_numbers_fail_the_network_check(load, caplog, seed):
    file = load(HEADER + f"    x = tf.nn.dropout(x, rate=0.5, seed={seed})\n" + GOOD)
    train_and_evaluate(file)
    assert "draws random numbers with RandomUniform, which are not reproducible" in caplog.text
    with pytest.raises(UserError, match="computes different results each time"):
        check_network(file.config, V, file.functions)


def test_dropout_and_random_initial_values_are_not_warned_about(load, caplog):
    start = "    x *= tf.get_variable('w', initializer=tf.random_uniform([4], seed=3))\n"
    file = load(HEADER + start + "    x = context.dropout(x, 0.5)\n" + GOOD)
    train_and_evaluate(file)
    check_network(file.config, V, file.functions)
    assert "draws random numbers" not in caplog.text


HELPER = """
import tensorflow.compat.v1 as tf

def model(x):
    return normalize(x)

def normalize(x):
    return tf.concat(1, [x, x])

def units(x):
    return x.shape[-1].value

def slices(x):
    return tf.split(1, 2, x)

def fixed(x):
    return tf.scatter_update(x, [0], [0.0])
"""


@pytest.mark.parametrize(
    "function, message",
    [
        ("model", "line 8, in build_outputs: .*TF 0.x; write tf.concat\\(values, axis\\)"),
        ("units", "line 11, in build_outputs: .*'value'; .* tf1.load"),
        ("slices", "line 14, in build_outputs: .* tf.split\\(value, count, axis\\)"),
        ("fixed", "line 17, in build_outputs: .* use constraint= of tf.get_variable"),
    ],
)
def test_an_error_names_the_innermost_line_of_the_users_files(load, tmp_path, function, message):
    name = f"lm_test_{function}"
    (tmp_path / f"{name}.py").write_text(HELPER)
    with pytest.raises(UserError, match=rf"{name}.py, {message}") as error:
        train_and_evaluate(load(f"import {name}\n" + HEADER + f"    {name}.{function}(x)\n" + GOOD))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "body, message",
    [
        ("    x[-2:] if x.shape[0] > 1 else tf.reshape(x, [7])\n" + GOOD, "mine.py, line 13, "),
        ("    return x, {'h': x[-1] if x.shape[0] > 1 else x}\n", r"new_state\['h'\] must have"),
    ],
)
def test_a_mistake_only_for_single_words_says_so(load, body, message):
    file = load(HEADER + body)
    message += r".*; this is the call for single words \(T = 1, not num_steps ="
    with pytest.raises(UserError, match=message):
        check_network(file.config, V, file.functions)


@pytest.mark.parametrize("size, shown", [(300, 300), (301, 300)])
def test_long_messages_are_cut(size, shown):
    assert short_message(ValueError("x" * size)) == "ValueError: " + "x" * shown


def test_missing_tf_keras_is_an_error_that_names_the_package(load, monkeypatch):
    def gone(*arguments, **options):
        raise AttributeError("`BasicLSTMCell` is not available with Keras 3.")

    file = load(CLASSIC)
    monkeypatch.setattr("tensorflow.compat.v1.nn.rnn_cell.BasicLSTMCell", gone, raising=False)
    minor = ".".join(tf.__version__.split(".")[:2])
    missing = rf"pip install --no-deps 'tf_keras=={minor}\.\*'\)?$"
    with pytest.raises(UserError, match=missing):
        train_and_evaluate(file)
    with pytest.raises(UserError, match=rf", line \d+: AttributeError: .*{missing}"):
        load(HEADER + "tf.nn.rnn_cell.BasicLSTMCell()\n")
