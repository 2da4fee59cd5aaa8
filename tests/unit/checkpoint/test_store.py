"""Checkpoints: written atomically, verified, found, kept, and readable by stock TensorFlow."""

import errno
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import lm.files
import lm.record
from lm.checkpoint import store
from lm.checkpoint.variables import VariableReader
from lm.errors import RunError, UserError
from lm.record import CorruptFile, has_checkpoints
from tests.unit.checkpoint.saved import ARRAYS, manifest, save, steps, truncate
from tests.untrained import rewrite_manifest


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


def test_saving_a_step_again_changes_only_its_manifest(tmp_path):
    path = save(tmp_path, 3)
    before = (path / "model.data-00000-of-00001").stat()
    save(tmp_path, 3, 4.5)
    assert store.verify(str(path)).valid_perplexity == 4.5
    after = (path / "model.data-00000-of-00001").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_every_flipped_bit_of_a_manifest_is_detected(tmp_path):
    path = save(tmp_path, 1) / "manifest.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]]))
        with pytest.raises(CorruptFile):
            store.verify(str(path.parent))


FORGED = [
    (
        {"files": {"../../dev/zero": {"bytes": 0, "sha256": ""}}},
        "manifest.json names ../../dev/zero",
    ),
    ({"files": {"model.index": 1}}, "model.index is corrupt: its size"),
    ({"files": []}, "manifest.json is corrupt: files is a list"),
    ({"weights": "embedding"}, "manifest.json is corrupt: weights is a str"),
    ({"valid_perplexity": "9"}, "manifest.json is corrupt: valid_perplexity is a str"),
    ({"step": None}, "manifest.json is corrupt: step is a NoneType"),
]


@pytest.mark.timeout(20)  # /dev/zero has no end
def test_a_forged_manifest_is_a_one_line_error(tmp_path):
    path = save(tmp_path, 1)
    whole = (path / "manifest.json").read_bytes()
    for changes, message in FORGED:
        (path / "manifest.json").write_bytes(whole)
        rewrite_manifest(path, lambda content, changes=changes: content.update(changes))
        with pytest.raises(CorruptFile) as raised:
            store.verify(str(path))
        assert str(raised.value).startswith(f"{path}/{message}")
        assert "\n" not in str(raised.value)


def test_a_vanished_run_directory_is_not_created_again(tmp_path):
    with pytest.raises(RunError, match=r"No such file"):
        save(tmp_path / "gone", 1)
    assert not (tmp_path / "gone").exists()


def test_the_first_checkpoint_is_recorded_before_it_exists(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(store, "_publish", lambda *_: seen.append(has_checkpoints(str(tmp_path))))
    save(tmp_path, 1)
    assert seen == [True]


KILL = """
import os, signal, sys
from lm.checkpoint import store
from tests.unit.checkpoint import test_store as t

run_dir = sys.argv[1]
places = [
    ("_write_tensors", "before"), ("_write_tensors", "after"), ("_write_manifest", "before"),
    ("_write_manifest", "after"), ("_publish", "before"), ("_publish", "after"),
    ("_remove", "before"), ("_remove", "after"),
]
for step, (name, when) in enumerate(places, start=3):
    child = os.fork()
    if not child:
        original = getattr(store, name)

        def deadly(*args):
            if when == "after":
                original(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(store, name, deadly)
        t.save(run_dir, step, keep=2)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, (name, when)
    complete = name == "_remove" or (name, when) == ("_publish", "after")
    newest = store.find_newest(run_dir)
    assert newest.endswith(f"{step:08d}") == complete, (name, when, newest)
    for path in store.list_checkpoints(run_dir):
        store.verify(path)
    store.remove_temporary(run_dir)
    assert all(name.startswith("step-") for name in os.listdir(f"{run_dir}/checkpoints"))
"""


def test_a_kill_in_any_phase_of_a_save_leaves_only_complete_checkpoints(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    # A separate process: fork is safe only before TensorFlow has started threads.
    command = [sys.executable, "-c", KILL, tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path):
    for step, perplexity in [(1, 9.0), (2, 5.0), (3, None), (4, 7.0), (5, 8.0), (6, float("inf"))]:
        save(tmp_path, step, perplexity, keep=3)
    assert steps(tmp_path) == [2, 4, 5, 6]
    assert store.find(str(tmp_path)).endswith("step-00000006")
    assert store.find(str(tmp_path), "best").endswith("step-00000002")
    path = str(tmp_path / "checkpoints" / "step-00000004")
    assert store.find(str(tmp_path), path) == path


def test_a_best_epoch_without_a_checkpoint_is_a_warning(tmp_path, caplog):
    progress = {"valid_perplexities": [9.0, 5.0, 7.0]}
    for step, perplexity in [(1, 9.0), (3, 7.0)]:
        save(tmp_path, step, perplexity, progress=progress)
    assert store.find(str(tmp_path), "best").endswith("step-00000003")
    assert "best validation perplexity, 5.00, has no usable checkpoint" in caplog.text
    assert "using step 3, with 7.00" in caplog.text


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000, 100_000_001):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [100_000_000, 100_000_001]
    assert store.find_newest(str(tmp_path)).endswith("step-100000001")


def test_corrupt_checkpoints_never_displace_intact_ones(tmp_path):
    for step, perplexity in [(10, 7.0), (20, 9.0), (30, 1.0), (40, None)]:
        path = save(tmp_path, step, perplexity)
        if step >= 30:
            truncate(path)
    for step in (21, 22, 23):  # resumed from step 20
        save(tmp_path, step, keep=2)
    # The corrupt step 30 is not the best. Checkpoints newer than the intact ones are not removed.
    assert steps(tmp_path) == [10, 22, 23, 30, 40]
    assert store.find_newest(str(tmp_path)).endswith("23")
    for step in (40, 50):  # 40 is written again, and 30 becomes old
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [10, 40, 50]


@pytest.mark.parametrize("name", ["manifest.json", "model.data-00000-of-00001"])
def test_a_disk_that_fails_for_a_moment_is_not_corruption(tmp_path, monkeypatch, name):
    save(tmp_path, 1, 2.0)
    newest = save(tmp_path, 2, 8.0)

    def fail_to_open(path, *arguments):
        if path == str(newest / name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return open(path, *arguments)

    for module in (lm.files, lm.record):
        monkeypatch.setattr(module, "open", fail_to_open, raising=False)
    for read in (
        lambda: store.find_newest(str(tmp_path)),
        lambda: store.find(str(tmp_path), str(newest)),
        lambda: store.intact_manifests(str(tmp_path)),
    ):
        # Programs exit with code 1 after both errors, so that the job is restarted.
        with pytest.raises((OSError, RunError), match=name):
            read()
    with pytest.raises(RunError, match="Input/output error"):
        save(tmp_path, 2, 7.0)
    assert steps(tmp_path) == [1, 2]
    monkeypatch.undo()
    assert store.find_newest(str(tmp_path)) == str(newest)


def test_checkpoints_of_diverged_ranks_displace_no_others(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, keep=1)
    for step in (3, 4):
        save(tmp_path, step, keep=1, in_sync=False)
    assert steps(tmp_path) == [2, 3, 4]
    save(tmp_path, 5, keep=1)
    assert steps(tmp_path) == [5]


FILES = ["manifest.json", "model.index", "model.data-00000-of-00001"]
DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "a bit flipped": lambda path: path.write_bytes(
        bytes([*(d := path.read_bytes())[: len(d) // 2], d[len(d) // 2] ^ 1, *d[len(d) // 2 + 1 :]])
    ),
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "not JSON": lambda path: path.write_bytes(b"x" * path.stat().st_size),
    "different JSON": lambda path: path.write_bytes(b"[1]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_corrupt_newest_checkpoint_is_skipped_with_a_warning(tmp_path, caplog, name, damage):
    older, newer = save(tmp_path, 1, 3.0), save(tmp_path, 2, 2.0)
    DAMAGES[damage](newer / name)
    with pytest.raises(CorruptFile, match=name):
        store.verify(str(newer))
    with caplog.at_level("WARNING", "lm"):
        assert store.find_newest(str(tmp_path)) == str(older)
        assert name in caplog.text
        caplog.clear()
        assert store.find(str(tmp_path), "best") == str(older)
        assert name in caplog.text
    with pytest.raises(UserError, match=name):
        store.find(str(tmp_path), str(newer))
    save(tmp_path, 2)
    assert store.find_newest(str(tmp_path)) == str(newer)


@pytest.mark.parametrize(
    "changes, how",
    [
        ({"format": 1}, "format 1"),
        ({"format": 3}, "format 3"),
        ({"novelty": 1}, "unknown field novelty"),
    ],
)
def test_a_checkpoint_of_a_different_version_is_rejected_and_not_called_corrupt(
    tmp_path, changes, how
):
    save(tmp_path, 1, 9.0)
    newer = save(tmp_path, 2, 8.0)
    rewrite_manifest(newer, lambda content: content.update(changes))
    message = f"manifest.json was written by a different version of this program .{how}.; use"
    for choose in ("last", "best", str(newer)):  # no older checkpoint replaces it
        with pytest.raises(UserError, match=message):
            store.find(str(tmp_path), choose)
    with pytest.raises(UserError, match=message):
        save(tmp_path, 3, keep=1)
    assert steps(tmp_path) == [1, 2, 3]


def test_missing_and_only_corrupt_checkpoints_are_reported(tmp_path):
    assert store.find_newest(str(tmp_path)) is None
    with pytest.raises(UserError, match=r"has no checkpoint"):
        store.find(str(tmp_path))
    for step in (1, 2):
        (save(tmp_path, step) / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"all 2 checkpoints in .* are corrupt"):
        store.find_newest(str(tmp_path))


def test_large_arrays_are_read_and_written_in_parts(tmp_path, monkeypatch):
    """Only the parts of one file are in memory."""
    monkeypatch.setattr(store, "PART_BYTES", 100)
    monkeypatch.setattr(store, "_FILE_BYTES", 256)
    start = {"table": np.arange(300, dtype="f").reshape(60, 5), "bias": np.arange(200, dtype="f")}
    with tf.Graph().as_default(), tf.Session() as session:
        for name, array in {**start, "count": np.int64(7)}.items():
            tf.get_variable(name, initializer=array, use_resource=True)
        reader = VariableReader()
        session.run(tf.global_variables_initializer())
        parts = list(reader.parts(session))
    assert max(part.array.nbytes for part in parts) <= 100
    path = store.save(str(tmp_path), parts, manifest(1))
    files = sorted(file.name for file in pathlib.Path(path).iterdir())
    assert files[0] == "manifest.json" and files[-1] == "model.index" and len(files) > 7
    loaded = store.load_arrays(path, [*start, "count"])
    assert loaded["count"] == 7
    for name, array in start.items():
        np.testing.assert_array_equal(loaded[name], array)
    truncate(pathlib.Path(path), files[3])
    with pytest.raises(CorruptFile, match=files[3]):
        store.verify(path)
