"""Initializing a run with the checkpoint of a TF 1.x program."""

import dataclasses
import logging

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.config import RunOptions
from lm.data.batches import Rows
from lm.distributed.communicator import Communicator
from lm.errors import RunError, UserError
from lm.model.network import Network
from lm.model.windows import build_window_graph
from lm.tokens.symbols import Ids
from lm.training.initialize import _common_rows, find_source, initial_values
from lm.training.restore import BroadcastHook
from tests.tf1_program import NAMES, NETWORK, save
from tests.unit.model.networks import V


def load_from(path, functions, config, num_words=V, **options):
    """Return the values of the variables of a network after --init_from."""
    options = RunOptions(init_from=str(path), **options)
    with tf.Graph().as_default(), tf.Session() as session:
        build_window_graph(Network(config, num_words, functions), Rows(0, 1), "eval")
        values = initial_values(find_source(options), options, Ids(num_words), functions)
        hook = BroadcastHook(Communicator(), values, tf.no_op())
        session.run(tf.global_variables_initializer())
        hook.after_create_session(session, None)
        return session.run({v.op.name: v for v in tf.global_variables()})


@pytest.fixture
def network(load):
    """Return the functions and the config of the network of the program, with other names."""
    file = load(NETWORK.replace("UNITS", "4") + NAMES)
    return file.functions, file.config


@pytest.mark.parametrize("name", ["", "model.ckpt-7", "model.ckpt-7.index", "model.ckpt-7.meta"])
def test_weights_are_loaded_under_the_names_of_the_program(tmp_path, network, name, caplog):
    caplog.set_level(logging.INFO, "lm")
    saved = save(tmp_path / "there/model.ckpt-7", V)
    (tmp_path / "there").rename(tmp_path / "here")  # `checkpoint` contains the old path
    values = load_from(tmp_path / "here" / name, *network)
    assert {name.replace("net", "model") for name in values} == saved.keys()
    for weight, value in values.items():
        np.testing.assert_array_equal(value, saved[weight.replace("net", "model")])
    assert "loaded 3 weights of" in caplog.text
    unused = "beta1_power, beta2_power, global_step, model/out/Adam, model/out/Adam_1, 7 more"
    assert f"the network does not use {unused}" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "num_words", "units"),
    [(tf.float16, 50_000, 170), (tf.bfloat16, V, 4), (tf.float64, V, 4)],
)
def test_other_types_are_converted(tmp_path, load, dtype, num_words, units):
    """In float32, the large table has more than LOADED_BYTES, so such tables load in parts."""
    file = load(NETWORK.replace("UNITS", str(units)))
    saved = save(tmp_path / "model.ckpt", num_words, units, dtype)
    rename = "^net=main main/=model/"
    values = load_from(tmp_path, file.functions, file.config, num_words, init_rename=rename)
    np.testing.assert_array_equal(values["net/wte"], saved["model/wte"])
    np.testing.assert_array_equal(values["net/w"], saved["model/w"])


@pytest.mark.parametrize("num_words", [V - 2, V + 2])
def test_common_rows_of_a_table_are_loaded_on_request(tmp_path, network, num_words, caplog):
    caplog.set_level(logging.INFO, "lm")
    saved, common = save(tmp_path / "model.ckpt", V, dtype=tf.bfloat16), min(V, num_words)
    with pytest.raises(UserError, match=f"model/wte has {V} rows in .*, but {num_words} in this"):
        load_from(tmp_path, *network, num_words)
    values = load_from(tmp_path, *network, num_words, init_partly=True)
    np.testing.assert_array_equal(values["net/wte"][:common], saved["model/wte"][:common])
    np.testing.assert_array_equal(values["net/out"][:, :common], saved["model/out"][:, :common])
    assert np.all(np.abs(values["net/wte"][common:]) <= network[1].init_scale)
    assert f"loaded 1 weights of {tmp_path}/model.ckpt; loaded {common} rows of net/" in caplog.text


def test_a_bias_of_another_size_is_not_loaded():
    """Its gates would get values of other gates."""
    assert _common_rows("bias", {"bias": [8]}, [4], V) is None
    assert _common_rows("positions", {"positions": [8, 2]}, [4, 2], V).ids == range(4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_rename": "wte$=table"}, r"has no model/table .*of this shape are model/wte\. Map"),
        ({"init_rename": "model/w$=w"}, r"has no w \[4, 4\]: the nearest names .* model/w\. Map"),
        ({"init_rename": "wte=out"}, r"model/out has the shape \[4, 11\] in .* but \[11, 4\] in"),
        ({"init_rename": "wte"}, "--init_rename wte: it has no =; write 'regex=replacement'"),
        ({"init_rename": "(=a"}, r"--init_rename \(=a: missing \), unterminated"),
        ({"new_vocabulary": True}, "--new_vocabulary is for runs, but .* is a TF 1.x checkpoint"),
        ({"checkpoint": "best"}, "--checkpoint is for runs, but .* is a TF 1.x checkpoint"),
    ],
)
def test_mistakes_are_explained(tmp_path, network, options, message):
    save(tmp_path / "model.ckpt", V)
    with pytest.raises(UserError, match=message):
        load_from(tmp_path, *network, **options)


def test_a_checkpoint_without_matching_weights_is_rejected(tmp_path, network):
    save(tmp_path / "model.ckpt", V)
    functions, config = network
    config = dataclasses.replace(config, hidden_size=6)
    with pytest.raises(UserError, match="the checkpoint has no weights that fit this model"):
        load_from(tmp_path, functions, config, init_partly=True)


def test_a_checkpoint_that_does_not_exist_is_rejected(tmp_path, network):
    save(tmp_path / "model.ckpt", V)
    (tmp_path / "model.ckpt.index").unlink()
    with pytest.raises(UserError, match=r"checkpoint names .*model\.ckpt\.index is missing"):
        load_from(tmp_path, *network)
    (tmp_path / "empty").mkdir()
    for path in ("model.ckpt", "empty"):
        with pytest.raises(UserError, match="is neither a run, a checkpoint of a run nor"):
            load_from(tmp_path / path, *network)


@pytest.mark.parametrize("file", ["checkpoint", "model.ckpt.index"])
def test_a_corrupt_file_is_named(tmp_path, network, file):
    save(tmp_path / "model.ckpt", V)
    (tmp_path / file).write_bytes(b"garbage\xff")
    prefix = file.removesuffix(".index")
    with pytest.raises(RunError, match=f"{prefix} cannot be read: .*; copy its files again"):
        load_from(tmp_path, *network)
