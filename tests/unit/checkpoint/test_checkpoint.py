"""Checkpoints: read by stock TensorFlow, whole or not at all, and damage is found."""

import dataclasses
import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.checkpoint import format as checkpoint
from lm.errors import RunError
from tests.unit.checkpoint.saved import ARRAYS, manifest, save
from tests.untrained import rewrite_manifest


def test_its_path_need_not_be_utf8(tmp_path):
    run_dir = tmp_path / os.fsdecode(b"\xe4")
    run_dir.mkdir()
    path = save(run_dir, 40)
    assert checkpoint.verify(str(path)).step == 40
    loaded = checkpoint.load_arrays(str(path))["embedding"]
    np.testing.assert_array_equal(loaded, ARRAYS["embedding"])


def test_a_file_system_may_not_know_fsync_of_directories(tmp_path, monkeypatch):
    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if tmp_path in written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    written = []
    monkeypatch.setattr(os, "fsync", fsync)
    assert checkpoint.verify(str(save(tmp_path, 40))).step == 40
    written.append(tmp_path)
    with pytest.raises(RunError, match="Input/output error"):
        save(tmp_path, 41)


def test_stock_tensorflow_reads_it(tmp_path):
    path = save(tmp_path, 40)
    assert path == tmp_path / "checkpoints" / "step-00000040"
    reader = tf.train.load_checkpoint(str(path / "model"))
    assert set(reader.get_variable_to_shape_map()) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(reader.get_tensor(name), array)
    assert list(checkpoint.load_weights(str(path))) == ["embedding"]
    assert checkpoint.verify(str(path)).world_size == 2


def test_stock_saver_restores_it(tmp_path):
    path = save(tmp_path, 40)
    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.get_variable("embedding", [30, 20], use_resource=True)
        tf.train.Saver([variable]).restore(session, str(path / "model"))
        np.testing.assert_array_equal(session.run(variable), ARRAYS["embedding"])


def test_an_average_is_the_result_where_there_is_one(tmp_path):
    arrays = {**ARRAYS, "embedding/average": ARRAYS["embedding"] + 1}
    for step, averaged in [(1, False), (2, True)]:
        path = checkpoint.save(str(tmp_path), arrays, manifest(step, averaged=averaged))
        (found,) = checkpoint.load_weights(path).values()
        np.testing.assert_array_equal(found, ARRAYS["embedding"] + averaged)


def test_a_weight_that_is_called_as_an_average_is_none(tmp_path):
    arrays = {**ARRAYS, "embedding/average": ARRAYS["embedding"] + 1}
    described = dataclasses.replace(manifest(1, averaged=True), weights=tuple(sorted(arrays)))
    path = checkpoint.save(str(tmp_path), arrays, described)
    found = checkpoint.load_weights(path)
    np.testing.assert_array_equal(found["embedding"], ARRAYS["embedding"])
    np.testing.assert_array_equal(found["embedding/average"], arrays["embedding/average"])


def test_saving_a_step_again_changes_its_manifest_only(tmp_path):
    path = save(tmp_path, 3)
    before = (path / "model.data-00000-of-00001").stat()
    save(tmp_path, 3, 4.5)
    assert checkpoint.verify(str(path)).valid_perplexity == 4.5
    after = (path / "model.data-00000-of-00001").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_every_single_bit_of_a_manifest_counts(tmp_path):
    path = save(tmp_path, 1) / "manifest.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]]))
        with pytest.raises(RunError):
            checkpoint.verify(str(path.parent))


def test_an_older_manifest_has_the_defaults(tmp_path):
    path = save(tmp_path, 1, 5.0)
    rewrite_manifest(path, lambda content: content.pop("valid_perplexity"))
    assert checkpoint.verify(str(path)).valid_perplexity is None


MADE_UP = [
    ({"files": {"../../dev/zero": {"bytes": 0, "sha256": ""}}}, "'../../dev/zero'"),
    ({"files": {"/dev/zero": {"bytes": 0, "sha256": ""}}}, "'/dev/zero'"),
    ({"files": {"model.\0": {"bytes": 0, "sha256": ""}}}, r"'model.\x00'"),
    ({"files": {"model.index": 1}}, "'model.index'"),
    ({"files": {}}, "no model.index"),
    ({"files": []}, "files is a list"),
    ({"weights": [["embedding"]]}, "weights"),
    ({"weights": "embedding"}, "weights is a str"),
    ({"valid_perplexity": "9"}, "valid_perplexity is a str"),
    ({"step": None}, "step is a NoneType"),
]


@pytest.mark.timeout(20)  # /dev/zero has no end
def test_a_made_up_manifest_is_one_clear_line(tmp_path):
    path = save(tmp_path, 1)
    whole = (path / "manifest.json").read_bytes()
    for changes, words in MADE_UP:
        (path / "manifest.json").write_bytes(whole)
        rewrite_manifest(path, lambda content, changes=changes: content.update(changes))
        with pytest.raises(RunError) as raised:
            checkpoint.verify(str(path))
        assert str(raised.value).startswith(f"{path}/manifest.json is corrupt: ")
        assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["manifest.json", "model.index"])
def test_what_is_not_a_plain_file_is_not_read(tmp_path, name):
    path = save(tmp_path, 1)
    for make in (lambda: os.mkfifo(path / name), lambda: (path / name).symlink_to("/dev/zero")):
        (path / name).unlink()
        make()
        with pytest.raises(RunError, match=f"{name} is not a plain file"):
            checkpoint.verify(str(path))


def test_a_manifest_that_would_fill_the_memory_is_not_read(tmp_path):
    path = save(tmp_path, 1)
    os.truncate(path / "manifest.json", 1 << 40)  # sparse: takes no space
    with pytest.raises(RunError, match=r"manifest.json has 1099511627776 bytes, too many"):
        checkpoint.verify(str(path))


def test_unknown_weights_are_named(tmp_path):
    path = save(tmp_path, 1)
    rewrite_manifest(path, lambda content: content.update(weights=["embedding", "flux"]))
    with pytest.raises(RunError, match=r"step-00000001 has no flux, which its manifest names"):
        checkpoint.load_weights(str(path))


def test_a_failed_save_leaves_the_others_and_no_rest(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_manifest", no_space)
    with pytest.raises(RunError, match=r"cannot write .*step-00000002: No space left"):
        save(tmp_path, 2)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_a_vanished_directory_is_not_made_anew(tmp_path):
    with pytest.raises(RunError, match=r"No such file"):
        save(tmp_path / "gone", 1)
    assert not (tmp_path / "gone").exists()


KILL = """
import os, signal, sys
from lm.checkpoint import choice
from lm.checkpoint import format as checkpoint
from tests.unit.checkpoint import test_checkpoint as t

run_dir = sys.argv[1]
places = [
    ("_write_tensors", "before"), ("_write_tensors", "after"), ("_write_manifest", "before"),
    ("_write_manifest", "after"), ("_publish", "before"), ("_publish", "after"),
    ("remove", "before"), ("remove", "after"),
]
for step, (name, when) in enumerate(places, start=3):
    child = os.fork()
    if not child:
        module = choice if name == "remove" else checkpoint
        original = getattr(module, name)

        def deadly(*args):
            if when == "after":
                original(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, deadly)
        t.save(run_dir, step, keep=2)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, (name, when)
    complete = name == "remove" or (name, when) == ("_publish", "after")
    newest = choice.newest(run_dir)
    assert newest.endswith(f"{step:08d}") == complete, (name, when, newest)
    for path in checkpoint.list_checkpoints(run_dir):
        checkpoint.verify(path)
    checkpoint.remove_temporary(run_dir)
    assert all(name.startswith("step-") for name in os.listdir(f"{run_dir}/checkpoints"))
"""


def test_killed_in_any_phase_of_a_save(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    # A process of its own: fork is safe only before TensorFlow has started threads.
    command = [sys.executable, "-c", KILL, tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
