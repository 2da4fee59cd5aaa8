"""Checkpoints: read by stock TensorFlow, whole or not at all, and damage is found."""

import errno
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import lm.files
from lm.checkpoint import choice, verification
from lm.checkpoint import format as checkpoint
from lm.checkpoint import manifest as manifests
from lm.checkpoint.manifest import Manifest
from lm.errors import RunError, UserError
from tests.untrained import rewrite_manifest

ARRAYS = {
    "embedding": np.arange(600, dtype="f").reshape(30, 20),
    "global_step": np.int64(7),
    "state/0/h": np.ones([4, 20], "f"),
}


def manifest(step, perplexity=None, **fields):
    return Manifest(
        step=step, epoch=1, steps_per_epoch=100, world_size=2, seed=1, config={"seed": 1},
        vocabulary="v", corpus="c", position={"step": step}, weights=("embedding",),
        valid_perplexity=perplexity, **fields,
    )  # fmt: skip


def save(run_dir, step, perplexity=None, keep=None, **fields):
    path = checkpoint.save(str(run_dir), ARRAYS, manifest(step, perplexity, **fields))
    if keep:
        choice.prune(str(run_dir), keep)
    return pathlib.Path(path)


def steps(run_dir):
    return [int(path.rpartition("-")[2]) for path in checkpoint.list_checkpoints(str(run_dir))]


def truncate(path):
    data = path / "model.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-2])


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


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    for step, perplexity in [(1, 9.0), (2, 5.0), (3, None), (4, 7.0), (5, 8.0), (6, float("inf"))]:
        save(tmp_path, step, perplexity, keep=3)
    assert steps(tmp_path) == [2, 4, 5, 6]
    assert choice.find(str(tmp_path)).endswith("step-00000006")
    assert choice.find(str(tmp_path), "best").endswith("step-00000002")
    path = str(tmp_path / "checkpoints" / "step-00000004")
    assert choice.find(str(tmp_path), path) == path


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000, 100_000_001):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [100_000_000, 100_000_001]
    assert choice.newest(str(tmp_path)).endswith("step-100000001")


def test_damaged_checkpoints_never_push_out_whole_ones(tmp_path, caplog):
    for step, perplexity in [(10, 7.0), (20, 9.0), (30, 1.0), (40, None)]:
        path = save(tmp_path, step, perplexity)
        if step >= 30:
            truncate(path)
    for step in (21, 22, 23):  # resumed from step 20
        save(tmp_path, step, keep=2)
    # 30 is not the best, being damaged; what is newer than the whole ones is not removed.
    assert steps(tmp_path) == [10, 22, 23, 30, 40]
    assert choice.newest(str(tmp_path)).endswith("23")
    for step in (40, 50):  # on the way the damaged ones are written anew, or become old
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [10, 40, 50]
    # By pruning and by `newest`, not at each save.
    assert caplog.text.count("damaged checkpoint") == 4


@pytest.mark.parametrize("name", ["manifest.json", "model.data-00000-of-00001"])
def test_what_cannot_be_read_for_a_moment_is_no_damage(tmp_path, monkeypatch, caplog, name):
    best, newest = save(tmp_path, 1, 2.0), save(tmp_path, 2, 8.0)

    def fail_to_open(path, *arguments):
        if path in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open(path, *arguments)

    for module in (manifests, lm.files):
        monkeypatch.setattr(module, "open", fail_to_open, raising=False)
    monkeypatch.setattr(verification, "_found", {})  # as in a process that resumes
    failing = {str(best / name)}
    save(tmp_path, 3, 9.0, keep=1)
    assert steps(tmp_path) == [1, 2, 3]  # the best that is known, too
    assert f"skipping a checkpoint: {best / name} cannot be read" in caplog.text
    assert choice.find(str(tmp_path), "best") != str(best)
    failing = {str(path / name) for path in (best, newest, tmp_path / "checkpoints/step-00000003")}
    with pytest.raises(RunError, match="can be read: see the warnings") as raised:
        choice.newest(str(tmp_path))
    assert not isinstance(raised.value, UserError)  # which no job tries again after
    failing = set()
    monkeypatch.setattr(verification, "_found", {})  # the next start looks again
    save(tmp_path, 4, 9.0, keep=1)
    assert steps(tmp_path) == [1, 4]
    assert choice.find(str(tmp_path), "best") == str(best)
    failing = {str(best / "manifest.json")}  # of which this process knows that it is whole
    for step in (5, 6):
        save(tmp_path, step, keep=1)
    assert str(best) in checkpoint.list_checkpoints(str(tmp_path)) and steps(tmp_path)[-1] == 6
    assert 5 not in steps(tmp_path)


def test_what_was_saved_after_the_ranks_had_parted_pushes_out_nothing(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, keep=1)
    for step in (3, 4, 5):  # whose hosts part again and again
        save(tmp_path, step, keep=1, in_sync=False)
    assert steps(tmp_path) == [2, 5]
    save(tmp_path, 6, keep=1)
    assert steps(tmp_path) == [6]


def test_pruning_hashes_a_checkpoint_once(tmp_path, monkeypatch):
    hashed = []

    def counting(path, original=manifests.sha256_of):
        hashed.append(path)
        return original(path)

    paths = [save(tmp_path, step, 9.0 - step) for step in (1, 2, 3)]
    monkeypatch.setattr(manifests, "sha256_of", counting)
    choice.prune(str(tmp_path), 2)
    assert steps(tmp_path) == [2, 3] and not hashed  # this process has written them
    monkeypatch.setattr(verification, "_found", {})  # as in a process that resumes
    for _ in range(2):
        choice.prune(str(tmp_path), 2)
    assert len(hashed) == 4  # two files in each of two
    # Damage that came later is found: the file's time tells.
    data = paths[1] / "model.data-00000-of-00001"
    data.write_bytes(b"x" * data.stat().st_size)
    os.utime(data, (1, 1))
    save(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [3, 4]
    save(tmp_path, 5, keep=3)
    assert steps(tmp_path) == [3, 4, 5]


def test_saving_a_step_again_changes_its_manifest_only(tmp_path):
    path = save(tmp_path, 3)
    before = (path / "model.data-00000-of-00001").stat()
    save(tmp_path, 3, 4.5)
    assert checkpoint.verify(str(path)).valid_perplexity == 4.5
    after = (path / "model.data-00000-of-00001").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


FILES = ["manifest.json", "model.index", "model.data-00000-of-00001"]
DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "a bit flipped": lambda path: path.write_bytes(
        bytes([*(d := path.read_bytes())[: len(d) // 2], d[len(d) // 2] ^ 1, *d[len(d) // 2 + 1 :]])
    ),
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "not JSON": lambda path: path.write_bytes(b"x" * path.stat().st_size),
    "another JSON": lambda path: path.write_bytes(b"[1]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_newest_one_is_skipped_with_a_message(tmp_path, caplog, name, damage):
    older, newer = save(tmp_path, 1, 3.0), save(tmp_path, 2, 2.0)
    DAMAGES[damage](newer / name)
    with pytest.raises(RunError, match=name):
        checkpoint.verify(str(newer))
    with caplog.at_level("WARNING", "lm"):
        assert choice.newest(str(tmp_path)) == str(older)
        assert name in caplog.text
        caplog.clear()
        assert choice.find(str(tmp_path), "best") == str(older)
        assert name in caplog.text
    with pytest.raises(UserError, match=r"not a usable checkpoint"):
        choice.find(str(tmp_path), str(newer))
    # Saved again, it is whole again.
    save(tmp_path, 2)
    assert choice.newest(str(tmp_path)) == str(newer)


def test_every_single_bit_of_a_manifest_counts(tmp_path):
    path = save(tmp_path, 1) / "manifest.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]]))
        with pytest.raises(RunError):
            checkpoint.verify(str(path.parent))


@pytest.mark.parametrize(
    "changes, how", [({"format": 2}, "format 2"), ({"novelty": 1}, "unknown field novelty")]
)
def test_a_newer_version_of_the_program_is_not_called_damage(tmp_path, caplog, changes, how):
    save(tmp_path, 1, 9.0)
    newer = save(tmp_path, 2, 8.0)
    rewrite_manifest(newer, lambda content: content.update(changes))
    message = f"manifest.json was written by a newer version of this program .{how}.; update it"
    for choose in ("last", "best", str(newer)):  # nor passed over for an older one
        with pytest.raises(UserError, match=message):
            choice.find(str(tmp_path), choose)
    # It may be the best, and whole: nobody here can tell.
    save(tmp_path, 3, keep=1)
    assert steps(tmp_path) == [1, 2, 3]
    assert "no checkpoint is removed: " in caplog.text and "newer version" in caplog.text


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
        assert str(raised.value).startswith(f"{path}/manifest.json is damaged: ")
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


def test_where_all_are_damaged_or_none_is_there(tmp_path):
    assert choice.newest(str(tmp_path)) is None
    with pytest.raises(UserError, match=r"has no checkpoint"):
        choice.find(str(tmp_path))
    for step in (1, 2):
        (save(tmp_path, step) / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"all 2 checkpoints in .* are damaged"):
        choice.newest(str(tmp_path))


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
