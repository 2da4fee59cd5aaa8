"""Checkpoints that stock TensorFlow reads, and large tensors."""

import pathlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.checkpoint import store, tensors, variables
from lm.record import CorruptFile
from tests.unit.checkpoint.saved import ARRAYS, manifest, save, truncate


def test_stock_tensorflow_reads_a_checkpoint(tmp_path):
    path = save(tmp_path, 40)
    assert path == tmp_path / "checkpoints" / "step-00000040"
    reader = tf.train.load_checkpoint(str(path / "model"))
    assert set(reader.get_variable_to_shape_map()) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(reader.get_tensor(name), array)
    assert store.weight_tensors(str(path)) == {"embedding": "embedding"}
    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("embedding", [30, 20], use_resource=True)
        tf.train.Saver([variable]).restore(session, str(path / "model"))
        np.testing.assert_array_equal(session.run(variable), ARRAYS["embedding"])


def test_weights_are_averages_if_the_checkpoint_has_them(tmp_path):
    arrays = {**ARRAYS, "embedding/average": ARRAYS["embedding"] + 1}
    for step, has_average in [(1, False), (2, True)]:
        path = save(tmp_path, step, arrays=arrays, has_average=has_average)
        average = "embedding/average" if has_average else "embedding"
        assert store.weight_tensors(str(path)) == {"embedding": average}


def test_large_arrays_are_read_and_written_in_parts(tmp_path, monkeypatch):
    """Only the parts of one file are in memory."""
    monkeypatch.setattr(variables, "_PART_BYTES", 100)
    monkeypatch.setattr(tensors, "_FILE_BYTES", 256)
    start = {"table": np.arange(300, dtype="f").reshape(60, 5), "bias": np.arange(200, dtype="f")}
    with tf.Graph().as_default(), tf.Session() as session:
        for name, array in {**start, "count": np.int64(7)}.items():
            tf.get_variable(name, initializer=array, use_resource=True)
        reader = variables.VariableReader()
        session.run(tf.global_variables_initializer())
        parts = list(reader.parts(session))
    assert max(part.array.nbytes for part in parts) <= 100
    path = store.save(str(tmp_path), parts, manifest(1))
    files = sorted(file.name for file in pathlib.Path(path).iterdir())
    assert files[0] == "manifest.json" and files[-1] == "model.index" and len(files) > 7
    loaded = tensors.load_arrays(path, [*start, "count"])
    assert loaded["count"] == 7
    for name, array in start.items():
        np.testing.assert_array_equal(loaded[name], array)
    truncate(pathlib.Path(path), files[3])
    with pytest.raises(CorruptFile, match=files[3]):
        store.verify(path)
