"""Checkpoints: written atomically, found, and kept."""

import errno
import os
import pathlib

import pytest

from lm.checkpoint import store
from lm.checkpoint.tensors import whole
from lm.errors import RunError, UserError
from lm.files import sha256_of
from lm.record import has_checkpoints
from tests.commands import run_code
from tests.unit.checkpoint.saved import ARRAYS, manifest, save, steps, truncate


def test_saving_a_step_again_changes_only_its_manifest(tmp_path):
    path = save(tmp_path, 3)
    before = (path / "model.data-00000-of-00001").stat()
    save(tmp_path, 3, 4.5)
    assert store.verify(str(path)).manifest.progress.valid_perplexity == 4.5
    after = (path / "model.data-00000-of-00001").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_vanished_run_directory_is_not_created_again(tmp_path):
    with pytest.raises(RunError, match=r"No such file"):
        save(tmp_path / "gone", 1)
    assert not (tmp_path / "gone").exists()


def test_the_first_checkpoint_is_recorded_when_it_exists(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as context, pytest.raises(RunError, match=r"Input/output error"):
        context.setattr("os.rename", fail)
        save(tmp_path, 1)
    assert not has_checkpoints(str(tmp_path))
    save(tmp_path, 1)
    assert has_checkpoints(str(tmp_path))


KILL = """
import itertools, os, shutil, signal, sys
from lm.checkpoint import store
from tests.unit.checkpoint.saved import save, steps

run_dir, found = sys.argv[1], []
for number in itertools.count(1):
    child = os.fork()
    if not child:
        remaining = iter(range(number - 1))

        def deadly(operation):
            def replacement(*args, **kwargs):
                if next(remaining, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return operation(*args, **kwargs)
            return replacement

        for owner, name in [
            (os, "mkdir"), (os, "fsync"), (os, "rename"), (os, "replace"), (os, "rmdir"),
            (shutil, "rmtree"), (store, "write_tensors"),
        ]:
            setattr(owner, name, deadly(getattr(owner, name)))
        save(run_dir, 2 + number, keep=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    newest = store.find_newest(run_dir).manifest.step
    assert newest in (*found[-1:], 2, 2 + number)
    found.append(newest)
    for path in store.list_checkpoints(run_dir):
        store.verify(path)
    store.remove_temporary(run_dir)
    assert all(name.startswith("step-") for name in os.listdir(f"{run_dir}/checkpoints"))
    if not os.WIFSIGNALED(status):
        break
print(*found)
"""


def test_a_kill_before_any_disk_operation_of_a_save_leaves_only_complete_checkpoints(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    # A separate process: fork is safe only before TensorFlow has started threads.
    result = run_code(KILL, tmp_path, timeout=120, forked=True)
    assert result.returncode == 0, result.stderr
    newest = [int(step) for step in result.stdout.split()]
    assert newest[0] == 2 and newest[-1] == 2 + len(newest) and len(newest) > 8


def test_all_files_are_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    """A rename may reach the disk before the contents of the files, and then the power may fail."""
    fsync, rename, flushed = os.fsync, os.rename, set()

    def note(descriptor):
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def check(source, target):
        assert {path.stat().st_ino for path in (source, *source.iterdir())} <= flushed
        rename(source, target)

    monkeypatch.setattr("os.fsync", note)
    monkeypatch.setattr("os.rename", lambda source, target: check(pathlib.Path(source), target))
    path = save(tmp_path, 1)
    assert path.parent.stat().st_ino in flushed


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path):
    for step, perplexity in [(1, 9.0), (2, 5.0), (3, None), (4, 7.0), (5, 8.0), (6, float("inf"))]:
        save(tmp_path, step, perplexity, keep=3)
    assert steps(tmp_path) == [2, 4, 5, 6]
    assert store.find(str(tmp_path)).path.endswith("step-00000006")
    assert store.find(str(tmp_path), "best").path.endswith("step-00000002")
    path = str(tmp_path / "checkpoints" / "step-00000004")
    assert store.find(str(tmp_path), path).path == path


def test_only_the_best_checkpoint_is_verified(tmp_path, caplog):
    worst, best, second = (save(tmp_path, i, p) for i, p in [(1, 9.0), (2, 5.0), (3, 7.0)])
    truncate(worst)
    assert store.find(str(tmp_path), "best").path == str(best)
    assert not caplog.text
    truncate(best)
    assert store.find(str(tmp_path), "best").path == str(second)
    assert "skipping a corrupt checkpoint: " in caplog.text
    truncate(second)
    with pytest.raises(UserError, match="no checkpoint with a validation perplexity"):
        store.find(str(tmp_path), "best")


def test_a_best_epoch_without_a_checkpoint_is_a_warning(tmp_path, caplog):
    validations = dict(valid_perplexities=(9.0, 5.0, 7.0), valid_steps=(1, 2, 3))
    for step, perplexity in [(1, 9.0), (3, 7.0)]:
        save(tmp_path, step, perplexity, **validations)
    assert store.find(str(tmp_path), "best").path.endswith("step-00000003")
    assert "best validation perplexity, 5.00, has no usable checkpoint" in caplog.text
    assert "using step 3, with 7.00" in caplog.text


def test_a_validation_that_only_an_early_stop_caused_does_not_count(tmp_path):
    save(tmp_path, 2, 5.0, valid_steps=())
    assert store.find(str(tmp_path), "best").path.endswith("step-00000002")
    save(tmp_path, 3, 7.0)
    assert store.find(str(tmp_path), "best").path.endswith("step-00000003")


def test_such_a_validation_does_not_remove_the_best_checkpoint_that_counts(tmp_path):
    save(tmp_path, 1, 6.0)
    save(tmp_path, 2)
    for step in (3, 4):
        save(tmp_path, step, 5.0, keep=1, valid_steps=())
        assert steps(tmp_path) == [1, step]


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000, 100_000_001):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [100_000_000, 100_000_001]
    assert store.find_newest(str(tmp_path)).path.endswith("step-100000001")


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_run_that_is_training_may_remove_checkpoints_during_a_search(
    tmp_path, monkeypatch, caplog, which
):
    verify, removed = store.verify, []
    save(tmp_path, 1, 90.0)
    best = save(tmp_path, 2, 70.0)

    def train_and_verify(path):
        if path == str(best) and not removed:
            removed.append(path)
            save(tmp_path, 3, 60.0)
            store.remove(path)
        return verify(path)

    monkeypatch.setattr(store, "verify", train_and_verify)
    assert store.find(str(tmp_path), which).manifest.step == 3
    assert removed and not caplog.records


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_checkpoint_that_another_host_removes_is_skipped(tmp_path, monkeypatch, caplog, which):
    """On NFS, a file that another host removed cannot be read, although it is open."""
    removed = []

    def remove_and_read(path):
        if not removed:
            removed.append(path)
            save(tmp_path, 3, 60.0)
            store.remove(os.path.dirname(path))
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return sha256_of(path)

    save(tmp_path, 1, 90.0)
    save(tmp_path, 2, 70.0)
    monkeypatch.setattr("lm.checkpoint.manifest.sha256_of", remove_and_read)
    assert store.find(str(tmp_path), which).manifest.step == 3
    assert "step-00000002" in removed[0] and not caplog.records


def test_the_error_for_a_run_that_only_has_an_average_names_it(tmp_path):
    store.save(str(tmp_path), [whole(ARRAYS)], manifest(1), name="average-1-1")
    with pytest.raises(UserError, match=r"only averages: choose one of average-1-1 with --"):
        store.find(str(tmp_path))
    with pytest.raises(UserError, match=r"step-1 does not exist; .* are: average-1-1$"):
        store.find(str(tmp_path), "step-1")


def test_a_checkpoint_outside_of_its_run_does_not_need_the_run(tmp_path):
    path = save(tmp_path, 1).rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").symlink_to("checkpoints")  # a loop, which raises OSError
    assert store.find(str(tmp_path), str(path)).path == str(path)


def test_an_interrupted_write_frees_its_space(tmp_path):
    def interrupted_groups():
        yield whole(ARRAYS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(str(tmp_path), interrupted_groups(), manifest(1), name="average")
    assert os.listdir(tmp_path / "checkpoints") == []


def test_processes_without_a_lock_may_write_the_same_average(tmp_path):
    save(tmp_path, 1)
    facts = manifest(1)

    def groups():
        """Let another process write the average after this process has begun to write it."""
        store.save(str(tmp_path), [whole(ARRAYS)], facts, name="average")
        yield whole(ARRAYS)

    (tmp_path / "checkpoints/tmp-average").mkdir()  # of a killed process
    saved = store.save(str(tmp_path), groups(), facts, name="average")
    assert store.verify(saved.path)
