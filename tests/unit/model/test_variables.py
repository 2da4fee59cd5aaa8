"""Variables of networks of config files: names, initial values, and checkpoints."""

import dataclasses

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.checkpoint import transfer
from lm.checkpoint.store import save
from lm.checkpoint.tensors import whole
from lm.data.batches import Rows
from lm.model import decoding
from lm.model.network import Network
from lm.model.windows import build_window_graph
from lm.user.network_check import check_network
from tests.unit.checkpoint.saved import manifest
from tests.unit.model.networks import GOOD, HEADER, V, start_values, train_and_evaluate, train_graph


def values_of(session):
    values = session.run({v.op.name: v for v in tf.global_variables()})
    return {name: np.array(value) for name, value in values.items()}


@pytest.mark.parametrize(
    "initializer",
    ["None", "tf.random_normal_initializer()", "tf.orthogonal_initializer",
     "lambda shape, dtype, partition_info=None: tf.random.uniform(shape)",
     "tf.glorot_uniform_initializer()", "tf2.initializers.HeNormal()",
     "tf2.keras.initializers.GlorotUniform()",
     "lambda shape, dtype, partition_info=None: tf.constant(np.random.normal(size=shape), dtype)"],
)  # fmt: skip
def test_initial_values_only_depend_on_the_seed_and_the_name(load, initializer):
    def values(before="", name="w", seed=1):
        imports = "import numpy as np\nimport tensorflow as tf2\n"
        variable = f"    w = tf.get_variable('{name}', [4, 4], initializer={initializer})\n"
        outputs = "    return tf.tensordot(x, w, 1) + state['h'], {'h': x[-1]}\n"
        file = load(imports + HEADER + before + variable + outputs)
        config = dataclasses.replace(file.config, seed=seed)
        return start_values(config, file.functions)[name]

    first = values()
    np.testing.assert_array_equal(first, values())
    np.testing.assert_array_equal(first, values("    tf.random.normal([3])\n"))
    assert (first != values(seed=2)).any()
    if "tf2" not in initializer and "np" not in initializer:  # these do not use the name
        assert (first != values(name="v")).any()


def test_the_draws_of_an_initial_value_are_independent(load):
    text = (
        "    draws = lambda *_, **options: tf.stack([tf.random_normal([4]) for _ in range(12)])\n"
        "    x *= tf.get_variable('w', [12, 4], initializer=draws)[0]\n"
    )

    def values(before):
        file = load(HEADER + before + text + GOOD)
        return start_values(file.config, file.functions)["w"]

    first = values("")
    assert len(np.unique(first)) == 48
    np.testing.assert_array_equal(first, values("    [tf.random_normal([]) for _ in range(5)]\n"))


def test_variables_that_are_not_trainable_are_saved(load):
    text = HEADER + (
        "    w = tf.get_variable('w', [4], initializer=tf.ones_initializer(), trainable=False)\n"
        "    return x * w, {'h': x[-1]}\n"
    )
    file = load(text)
    with tf.Graph().as_default():
        train_graph(Network(file.config, V, file.functions))
        weights = {v.op.name for v in tf.get_collection(tf.GraphKeys.MODEL_VARIABLES)}
        assert weights == {"embedding", "w", "softmax/weights", "softmax/bias"}
        assert "w" not in {v.op.name for v in tf.trainable_variables()}


def test_name_scopes_do_not_change_variable_names(load):
    text = (
        "    with tf.name_scope('embedding'):\n"
        "        x = context.embed(inputs_TB)\n"
        "    with tf.variable_scope('out'), tf.name_scope('Weights'):\n"
        "        x *= tf.get_variable('weights', [4])\n"
    )
    file = load(HEADER.replace("    x = context.embed(inputs_TB)\n", text) + GOOD)
    check_network(file.config, V, file.functions)
    for of_words in (False, True):
        with tf.Graph().as_default() as graph:
            network = Network(file.config, V, file.functions)
            if of_words:
                decoding.target_log_probs(network, *[tf.zeros([3, 2], tf.int32)] * 2)
            else:
                build_window_graph(network, Rows(0, 2), "eval")
        names = list(transfer.weight_variables(graph))
        assert names == ["embedding", "out/weights", "softmax/weights", "softmax/bias"]


@pytest.mark.parametrize(
    "scope",
    ["use_resource=False, partitioner=tf.fixed_size_partitioner(2)",
     "custom_getter=lambda get, name, shape=None, initializer=None, **_: get("
     "name, shape, initializer=initializer)"],
    ids=["partitioned", "custom getter"],
)  # fmt: skip
def test_a_scope_may_define_how_variables_are_created(load, scope):
    def losses(scope):
        text = f"    with tf.variable_scope('m', {scope}):\n"
        file = load(HEADER + text + "        x *= tf.get_variable('w', [4])\n" + GOOD)
        return train_and_evaluate(file, optimizer="adam", weight_decay=0.1)

    assert losses(scope) == losses("")


def test_a_variable_may_start_from_a_checkpoint(load, tmp_path):
    table = np.arange(4 * V, dtype="f").reshape(V, 4)
    saved = save(str(tmp_path), [whole({"old": table})], manifest(1)).path
    text = f"    if context.training:\n        path = {saved!r} + '/model'\n"
    text += "        tf.train.init_from_checkpoint(path, {'old': 'embedding'})\n"
    file = load(HEADER + text + GOOD)
    with tf.Graph().as_default(), tf.Session() as session:
        train_graph(Network(file.config, V, file.functions))
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        np.testing.assert_array_equal(values_of(session)["embedding"], table)


def test_variables_with_a_common_initial_tensor_are_loaded_separately(load, tmp_path):
    text = (
        "    start = tf.eye(4)\n"
        "    for i in range(2):\n"
        "        x += tf.tensordot(x, tf.get_variable(f'w{i}', initializer=start), 1)\n"
    )
    file = load(HEADER + text + GOOD)
    with tf.Graph().as_default() as graph, tf.Session() as session:
        build_window_graph(Network(file.config, V, file.functions), Rows(0, 1), "eval")
        session.run(tf.global_variables_initializer())
        loader = transfer.VariableLoader()
        graph.finalize()
        values = values_of(session)
        np.testing.assert_array_equal(values["w0"], values["w1"])
        values.update(w0=np.full([4, 4], 5, "f"), w1=np.full([4, 4], 7, "f"))
        path = save(str(tmp_path), [whole(values)], manifest(1)).path
        loader.load(session, path, {name: name for name in values})
        loaded = values_of(session)
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(loaded[name], value)


def test_a_constant_that_is_infinite_does_not_count_as_diverged(load):
    text = (
        "    mask = tf.constant([0, -np.inf, 0, 0])\n"
        "    mask = tf.get_variable('mask', initializer=mask, trainable=False)\n"
        "    x *= tf.nn.softmax(mask)\n"
    )
    file = load("import numpy as np\n" + HEADER + text + GOOD)
    with tf.Graph().as_default(), tf.Session() as session:
        build_window_graph(Network(file.config, V, file.functions), Rows(0, 1), "eval")
        session.run(tf.global_variables_initializer())
        values = values_of(session)
        assert np.isinf(values["mask"]).any()
        assert transfer.first_not_finite(session.graph, [whole(values)]) is None
        values["embedding"][3, 2] = np.nan
        assert transfer.first_not_finite(session.graph, [whole(values)]) == "embedding"


@pytest.mark.parametrize("scale", [None, 0.5])
def test_embedding_init_scale_overrides_the_initializer_of_a_scope(load, scale):
    text = (
        "    with tf.variable_scope('own', initializer=tf.ones_initializer()):\n"
        "        x += context.embed(inputs_TB)\n"
    )
    file = load(HEADER + text + GOOD)
    config = dataclasses.replace(file.config, embedding_init_scale=scale)
    table = start_values(config, file.functions)["own/embedding"]
    if scale is None:
        assert (table == 1).all()
    else:
        assert len(np.unique(table)) > V and config.init_scale < np.abs(table).max() < scale
