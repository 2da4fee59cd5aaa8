"""Checkpoints that stock TensorFlow reads, and large tensors."""

import pathlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.checkpoint import store, tensors, transfer
from lm.json_files import CorruptFile
from tests.unit.checkpoint.saved import ARRAYS, manifest, save, truncate


def test_stock_tensorflow_reads_a_checkpoint(tmp_path):
    path = save(tmp_path, 40)
    assert path == tmp_path / "checkpoints" / "step-00000040"
    reader = tf.train.load_checkpoint(str(path / "model"))
    assert set(reader.get_variable_to_shape_map()) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(reader.get_tensor(name), array)
    assert tensors.weight_tensors(store.verify(str(path))) == {"embedding": "embedding"}
    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("embedding", [30, 20], use_resource=True)
        tf.train.Saver([variable]).restore(session, str(path / "model"))
        np.testing.assert_array_equal(session.run(variable), ARRAYS["embedding"])


def test_large_variables_are_saved_and_loaded_in_parts(tmp_path, monkeypatch):
    """Only the variables of one group are in memory; most of these are larger than a group."""
    monkeypatch.setattr(transfer, "READ_BYTES", 256)
    monkeypatch.setattr(transfer, "LOADED_BYTES", 256)
    start = {"table": np.arange(300, dtype="f").reshape(60, 5), "bias": np.arange(200, dtype="f")}
    start |= {"row": np.ones([2, 90], "f"), "count": np.int64(7)}
    start |= {"no_rows": np.empty([0, 5], "f"), "no_columns": np.empty([60, 0], "f")}
    with tf.Graph().as_default(), tf.Session() as session:
        for name, array in start.items():
            tf.get_variable(name, initializer=array, use_resource=True)
        groups = transfer.VariableReader().groups
        session.run(tf.global_variables_initializer())
        sizes = [sum(part.array.nbytes for part in group) for group in groups(session)]
        assert sorted(sizes)[-3:] == [256, 360, 360]  # a row is not divided
        assert transfer.first_not_finite(tf.get_default_graph(), groups(session)) is None
        path = store.save(str(tmp_path), groups(session), manifest(1)).path
    files = sorted(file.name for file in pathlib.Path(path).iterdir())
    assert len(files) == len(sizes) + 2
    assert files[0] == "manifest.json" and files[-1] == "model.index"
    loaded = tensors.load_arrays(path, start)
    for name, array in start.items():
        np.testing.assert_array_equal(loaded[name], array)
    with tf.Graph().as_default() as graph, tf.Session() as session:
        empty = [tf.get_variable(name, a.shape, a.dtype) for name, a in start.items()]
        loader = transfer.VariableLoader(start)
        graph.finalize()
        session.run(loader.create_op)
        loader.load(session, path, {name: name for name in start})
        for array, value in zip(start.values(), session.run(empty)):
            np.testing.assert_array_equal(value, array)
    truncate(pathlib.Path(path), files[3])
    with pytest.raises(CorruptFile, match=files[3]):
        store.verify(path)
