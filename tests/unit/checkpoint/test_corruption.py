"""Checkpoints that are corrupt, unreadable, or of a different version."""

import errno
import os

import pytest

import lm.files
from lm.checkpoint import store
from lm.errors import RunError, UserError
from lm.json_files import CorruptFile
from tests.unit.checkpoint.saved import save, steps, truncate
from tests.untrained import rewrite_manifest


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
    ({"files": {"model.index": 1}}, "manifest.json is corrupt: files.model.index is a int"),
    ({"files": []}, "manifest.json is corrupt: files is a list"),
    ({"weights": "embedding"}, "manifest.json is corrupt: weights is a str"),
    ({"world_size": None}, "manifest.json is corrupt: world_size is a NoneType"),
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


def test_corrupt_checkpoints_never_displace_intact_ones(tmp_path):
    for step, perplexity in [(10, 7.0), (20, 9.0), (30, 1.0), (40, None)]:
        path = save(tmp_path, step, perplexity)
        if step >= 30:
            truncate(path)
    for step in (21, 22, 23):  # resumed from step 20
        save(tmp_path, step, keep=2)
    # The corrupt step 30 is not the best. Checkpoints newer than the intact ones are not removed.
    assert steps(tmp_path) == [10, 22, 23, 30, 40]
    assert store.find_newest(str(tmp_path)).path.endswith("23")
    for step in (40, 50):  # 40 is written again, and 30 becomes old
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [10, 40, 50]


@pytest.mark.parametrize("name", ["manifest.json", "model.data-00000-of-00001"])
def test_a_disk_that_fails_for_a_moment_is_not_corruption(tmp_path, monkeypatch, name):
    save(tmp_path, 1, 2.0)
    newest = save(tmp_path, 2, 8.0)

    def fail_to_open(path, *arguments, **keywords):
        if path == str(newest / name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return open(path, *arguments, **keywords)

    monkeypatch.setattr(lm.files, "open", fail_to_open, raising=False)
    for read in (
        lambda: store.find_newest(str(tmp_path)),
        lambda: store.find(str(tmp_path), str(newest)),
        lambda: list(store.usable(str(tmp_path), store.verify)),
    ):
        # Programs exit with code 1 after both errors, so that the job is restarted.
        with pytest.raises((OSError, RunError), match=name):
            read()
    with pytest.raises(RunError, match="Input/output error"):
        save(tmp_path, 2, 7.0)
    assert steps(tmp_path) == [1, 2]
    monkeypatch.undo()
    assert store.find_newest(str(tmp_path)).path == str(newest)


def test_a_checkpoint_with_a_bad_block_is_named_with_the_fix(tmp_path):
    save(tmp_path, 1, 3.0)
    newest = save(tmp_path, 2, 2.0)
    data = newest / "model.data-00000-of-00001"
    data.unlink()
    data.symlink_to("/proc/self/mem")  # reading its first byte is an error
    for which in ("last", "best"):
        with pytest.raises(RunError) as raised:
            store.find(str(tmp_path), which)
        assert str(raised.value) == (
            f"cannot read {data}: Input/output error; if this persists, move {newest} away to skip"
            " it"
        )


def test_checkpoints_that_cannot_be_listed_are_not_missing(tmp_path):
    """Otherwise, the best checkpoint would be removed, and a resumed run might start over."""
    (tmp_path / "checkpoints").symlink_to("checkpoints")
    for read in (store.find_newest, lambda path: list(store.usable(path, store.verify))):
        with pytest.raises(OSError, match=r"symbolic links: .*checkpoints'"):
            read(str(tmp_path))


def test_a_renamed_checkpoint_is_not_the_step_of_its_name(tmp_path, caplog):
    older, newest = save(tmp_path, 5), save(tmp_path, 40)
    renamed = older.rename(older.parent / "step-00000060")
    message = "step-00000060 contains step 5: rename it"
    with pytest.raises(CorruptFile, match=message):
        store.find(str(tmp_path), "step-00000060")
    assert store.find_newest(str(tmp_path)).path == str(newest)
    assert message in caplog.text
    save(tmp_path, 60)  # replaces it
    assert store.verify(str(renamed)).manifest.step == 60
    copy = renamed.rename(tmp_path / "mine")  # a copy may have any name
    assert store.find(str(tmp_path), str(copy)).path == str(copy)


def test_a_checkpoint_may_be_named_and_a_run_is_not_a_checkpoint(tmp_path, monkeypatch):
    paths = [save(tmp_path, step) for step in (1, 2)]
    (tmp_path / "other").mkdir()
    other = save(tmp_path / "other", 1)
    monkeypatch.chdir(other.parent)
    for name in ("step-00000001", "step-00000001/"):
        assert store.find(str(tmp_path), name).path.rstrip("/") == str(paths[0])
    assert store.find(str(tmp_path), "./step-00000001").path == "./step-00000001"
    monkeypatch.chdir(other)
    assert store.find(str(tmp_path), ".").path == "."
    names = "step-00000001, step-00000002"
    with pytest.raises(UserError, match=f"step-3 does not exist; the checkpoints .* are: {names}"):
        store.find(str(tmp_path), "step-3")
    with pytest.raises(UserError, match=rf"is a run: choose one of its checkpoints \({names}\)"):
        store.verify(str(tmp_path))  # as --init_from does


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
        assert store.find_newest(str(tmp_path)).path == str(older)
        assert name in caplog.text
        caplog.clear()
        assert store.find(str(tmp_path), "best").path == str(older)
        assert name in caplog.text
    with pytest.raises(UserError, match=name):
        store.find(str(tmp_path), str(newer))
    save(tmp_path, 2)
    assert store.find_newest(str(tmp_path)).path == str(newer)


@pytest.mark.parametrize(
    "changes, how",
    [
        ({"format": 2}, "format 2"),
        ({"format": 4}, "format 4"),
        ({"novelty": 1}, "unknown field 'novelty'"),
    ],
)
def test_a_different_version_is_rejected_but_not_called_corrupt(tmp_path, changes, how):
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
    with pytest.raises(UserError, match=r"all 2 checkpoints in .* are corrupt; restore one"):
        store.find_newest(str(tmp_path))
