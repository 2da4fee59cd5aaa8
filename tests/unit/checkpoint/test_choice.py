"""Which checkpoints go on, which are the best, which are kept, and which are passed over."""

import errno
import os

import pytest

import lm.files
from lm.checkpoint import choice, verification
from lm.checkpoint import format as checkpoint
from lm.checkpoint import manifest as manifests
from lm.errors import RunError, UserError
from tests.unit.checkpoint.saved import save, steps, truncate
from tests.untrained import rewrite_manifest


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    for step, perplexity in [(1, 9.0), (2, 5.0), (3, None), (4, 7.0), (5, 8.0), (6, float("inf"))]:
        save(tmp_path, step, perplexity, keep=3)
    assert steps(tmp_path) == [2, 4, 5, 6]
    assert choice.find(str(tmp_path)).endswith("step-00000006")
    assert choice.find(str(tmp_path), "best").endswith("step-00000002")
    path = str(tmp_path / "checkpoints" / "step-00000004")
    assert choice.find(str(tmp_path), path) == path


def test_that_the_best_epoch_has_no_checkpoint_is_told(tmp_path, caplog):
    lasts = {"position": {"valid_perplexities": [9.0, 5.0, 7.0]}}
    for step, perplexity in [(1, 9.0), (3, 7.0)]:
        rewrite_manifest(save(tmp_path, step, perplexity), lambda manifest: manifest.update(lasts))
    assert choice.find(str(tmp_path), "best").endswith("step-00000003")
    assert "best validation perplexity, 5.00, has no checkpoint" in caplog.text
    assert "taken is that of step 3, with 7.00" in caplog.text


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
    assert caplog.text.count("corrupt checkpoint") == 4


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
    with pytest.raises(RunError, match="cannot be read") as raised:
        choice.checked(str(best))  # as of --init_from
    assert not isinstance(raised.value, UserError)
    with pytest.raises(RunError, match="cannot be read"):
        save(tmp_path, 2, 7.0)  # of which there is one
    assert steps(tmp_path) == [1, 2, 3]
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


def test_where_all_are_damaged_or_none_is_there(tmp_path):
    assert choice.newest(str(tmp_path)) is None
    with pytest.raises(UserError, match=r"has no checkpoint"):
        choice.find(str(tmp_path))
    for step in (1, 2):
        (save(tmp_path, step) / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"all 2 checkpoints in .* are corrupt"):
        choice.newest(str(tmp_path))
