"""Runs that can be resumed, and runs that are rejected with one line."""

import contextlib
import dataclasses
import errno
import os
import re
import shutil

import pytest

from lm.checkpoint.run_dir import open_run_dir
from lm.config import RunOptions
from lm.data.corpus import load_corpus
from lm.errors import ProgramExit, RunError, UserError
from lm.files import locked
from lm.record import InitRecord, RunRecord
from tests.untrained import make_run, rewrite_manifest

PLATEAU, COSINE = {"lr_schedule": "plateau"}, {"lr_schedule": "cosine"}


@pytest.fixture(scope="module")
def made(tmp_path_factory, corpora):
    """Create an untrained run; return its directory, config and corpus."""
    directory = tmp_path_factory.mktemp("made") / "run"
    config = make_run(directory, corpora)
    return directory, config, load_corpus(str(corpora), config)


@pytest.fixture
def resume(made, tmp_path):
    """Resume a copy of the run with a changed manifest and changed config fields."""
    directory, config, corpus = made

    def resume(change, *, options=(), **fields):
        copy = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(directory, copy)
        rewrite_manifest(copy / "checkpoints/step-00000007", change)
        config_now = dataclasses.replace(config, **fields)
        with open_directory(copy, config_now, corpus, **dict(options)) as run_dir:
            return run_dir.checkpoint

    return resume


@contextlib.contextmanager
def open_directory(path, config, corpus, resume=True, **options):
    options = RunOptions(output_dir=path and str(path), resume=resume, **options)
    record = RunRecord(dataclasses.asdict(config), corpus.tokenizer.sha256, corpus.record)
    with contextlib.ExitStack() as stack:
        yield open_run_dir(options, record, type(config), stack)


def test_the_default_directory_is_named_by_config_and_time(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_directory(None, *made[1:], resume=False) as run_dir:
        parent, name = os.path.split(run_dir.path)
        assert parent == f"{tmp_path}/runs"
        assert re.fullmatch(rf"{made[1].name}-\d{{8}}-\d{{6}}", name)
        assert os.path.isdir(run_dir.path)


def test_a_config_field_missing_in_an_old_checkpoint_has_its_default(resume):
    def forget(manifest):
        del manifest["record"]["config"]["warmup_steps"]

    assert resume(forget).path.endswith("step-00000007")
    with pytest.raises(UserError, match=r"cannot resume: warmup_steps was 0 .* and is 5 now"):
        resume(forget, warmup_steps=5)
    with pytest.raises(UserError, match=r"cannot resume: vocab_size was None .* and is 50 now"):
        resume(lambda manifest: None, vocab_size=50)


def test_a_changed_vocabulary_names_its_files(resume):
    def change(manifest):
        manifest["record"]["vocabulary"] = "0" * 64

    with pytest.raises(UserError, match=r"the vocabulary has changed; restore vocabulary\.txt or"):
        resume(change)


def test_runs_that_start_in_the_same_second_have_different_directories(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(open_directory(None, *made[1:], resume=False)) for _ in "abc"]
        base = f"{tmp_path}/runs/{made[1].name}-now"
        assert [run.path for run in runs] == [base, f"{base}-2", f"{base}-3"]
    assert os.listdir("runs") == []  # no run has started


def test_a_directory_inside_a_run_is_rejected(made, tmp_path):
    copy = tmp_path / "copy"
    message = re.escape(f"inside the run {copy}: choose another directory")
    shutil.copytree(made[0], copy)
    for place in ("checkpoints/step-00000007", "checkpoints", "checkpoints/step-00000007/new"):
        for resume in (True, False):
            with pytest.raises(UserError, match=message):
                with open_directory(copy / place, *made[1:], resume):
                    pass
    (tmp_path / "link").symlink_to(copy / "checkpoints/step-00000007")
    for place in ("link", "link/new"):
        with pytest.raises(UserError, match=message):
            with open_directory(tmp_path / place, *made[1:], resume=False):
                pass
    assert os.listdir(copy / "checkpoints") == ["step-00000007"]
    assert not (copy / "checkpoints/step-00000007/new").exists()


@pytest.mark.parametrize("resume", [True, False])
def test_a_directory_that_contains_runs_does_not_become_a_run(made, tmp_path, resume):
    shutil.copytree(made[0], tmp_path / "runs/one")
    with pytest.raises(UserError, match="contains the run one: choose a new directory, or"):
        with open_directory(tmp_path / "runs", *made[1:], resume):
            pass
    shutil.copy(made[0] / "run.json", tmp_path)  # of a mistake of another user
    with open_directory(tmp_path / "runs/two", *made[1:], resume) as run_dir:
        assert run_dir.path == str(tmp_path / "runs/two")


def test_a_resume_needs_no_run_json(made, tmp_path):
    """The message about a corrupt run.json advises to remove it."""
    shutil.copytree(made[0], tmp_path / "copy")
    (tmp_path / "copy/run.json").unlink()
    with open_directory(tmp_path / "copy", *made[1:]) as run_dir:
        assert run_dir.checkpoint.manifest.step == 7


def test_a_resume_removes_the_files_of_a_save_that_was_killed(made, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(made[0], copy)
    (copy / "checkpoints/tmp-00000009").mkdir()
    with open_directory(copy, *made[1:]):
        assert os.listdir(copy / "checkpoints") == ["step-00000007"]


def test_a_resume_without_a_checkpoint_says_that_it_starts(made, tmp_path, caplog):
    with open_directory(tmp_path / "mistyped", *made[1:]) as run_dir:
        assert run_dir.checkpoint is None
    assert caplog.messages == [f"no checkpoint in {tmp_path}/mistyped: starting a new run"]


def test_a_resume_without_a_checkpoint_keeps_the_initial_weights(made, tmp_path):
    config, corpus = made[1:]
    record = RunRecord(dataclasses.asdict(config), corpus.tokenizer.sha256, corpus.record)
    record = dataclasses.replace(record, init_from=InitRecord("/runs/a", {}))
    record.write(str(tmp_path), has_checkpoints=False)
    with pytest.raises(UserError, match="has no checkpoint yet: add --init_from /runs/a to start"):
        with open_directory(tmp_path, *made[1:]):
            pass


def test_a_job_that_waits_gets_the_directory_that_the_previous_job_removes(
    made, tmp_path, monkeypatch
):
    first = contextlib.ExitStack()
    first.enter_context(open_directory(tmp_path / "run", *made[1:], resume=False))
    monkeypatch.setattr("time.sleep", lambda _: first.close())
    with open_directory(tmp_path / "run", *made[1:], resume=False):
        with pytest.raises(BlockingIOError), locked(str(tmp_path / "run/.lock")):
            pass
    assert os.listdir(tmp_path) == []


def test_a_second_job_is_told_where_the_first_job_started(made, tmp_path, monkeypatch):
    monkeypatch.setattr("lm.checkpoint.run_dir._LOCK_SECONDS", 0)
    config, corpus = made[1:]
    record = RunRecord(dataclasses.asdict(config), corpus.tokenizer.sha256, corpus.record)
    facts = {"date": "2026-11-28T09:00:00+00:00", "ranks_by_host": {"n7": 2, "n2": 1}}
    start = " (last started 2026-11-28T09:00:00+00:00 on n7)"
    for provenance, said in ((facts, start), ({**facts, "ranks_by_host": {}}, ""), ({}, "")):
        dataclasses.replace(record, provenance=provenance).write(str(tmp_path), False)
        _reject_second_job(made, tmp_path, said)
    (tmp_path / "run.json").write_text("{")
    _reject_second_job(made, tmp_path, "")
    (tmp_path / "run.json").unlink()
    _reject_second_job(made, tmp_path, "")


def _reject_second_job(made, path, said):
    with locked(str(path / ".lock")), pytest.raises(RunError) as raised:
        with open_directory(path, *made[1:]):
            pass
    expected = f"another job is using output_dir {path}{said}. If its host has died, an NFS"
    assert str(raised.value).startswith(expected)


@pytest.mark.parametrize(
    "number, passes", [(errno.EDQUOT, True), (errno.EROFS, True), (errno.EACCES, False)]
)
def test_a_full_or_failing_disk_is_not_a_user_error(made, tmp_path, monkeypatch, number, passes):
    _, config, corpus = made

    def fail(**_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    with pytest.raises(ProgramExit) as raised, open_directory(tmp_path / "run", config, corpus):
        pass
    assert str(raised.value) == f"cannot write to output_dir {tmp_path}/run: {os.strerror(number)}"
    assert isinstance(raised.value, RunError if passes else UserError)


@pytest.mark.parametrize(
    "hide, message",
    [
        (shutil.rmtree, "are missing: restore them, or remove run.json"),
        (lambda path: path.rename(path.parent / "elsewhere"), "are missing"),
        (lambda path: (shutil.rmtree(path), path.symlink_to("/not/mounted")), "broken symlink"),
        (
            lambda path: (shutil.rmtree(path.parent), path.parent.symlink_to("/no")),
            "copy is a broken",
        ),
        # The run was killed before its first checkpoint was written.
        (lambda path: (shutil.rmtree(path), (path.parent / "run.json").unlink()), None),
    ],
)
def test_a_run_whose_checkpoints_are_out_of_sight_is_not_restarted(made, tmp_path, hide, message):
    directory, config, corpus = made
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    hide(copy / "checkpoints")
    refused = pytest.raises(RunError, match=message) if message else contextlib.nullcontext()
    with refused, open_directory(copy, config, corpus) as run_dir:
        assert run_dir.checkpoint is None


@pytest.mark.parametrize("resume", [False, True])
def test_an_unwritable_checkpoint_directory_is_found_out_immediately(made, tmp_path, resume):
    def reject(kind, message):
        with pytest.raises(kind, match=message), open_directory(tmp_path, *made[1:], resume):
            pass

    checkpoints = tmp_path / "checkpoints"
    checkpoints.symlink_to("/not/mounted")
    reject(RunError, "checkpoints is a broken symlink")
    checkpoints.unlink()
    checkpoints.touch()
    reject(UserError, ": Not a directory")


@pytest.mark.parametrize(
    "options, recorded, now, message",
    [
        ({"test_on": "best"}, {}, {"eval_batch_size": 7}, "eval_batch_size was 20 .* is 7 now"),
        ({}, PLATEAU, {"eval_batch_size": 7}, "eval_batch_size was 20 .* is 7 now"),
        ({}, COSINE, {"num_epochs": 99}, r"num_epochs was \d+ .* is 99 now"),
    ],
)
def test_a_field_may_change_unless_the_run_depends_on_it(
    resume, caplog, options, recorded, now, message
):
    def record(manifest):
        manifest["record"]["config"].update(recorded)

    assert resume(lambda manifest: None, **now).path.endswith("step-00000007")
    (warning,) = caplog.messages  # The user may have forgotten a flag of the first job.
    assert re.fullmatch(message, warning)
    with pytest.raises(UserError, match=f"cannot resume: {message}"):
        resume(record, options=options, **recorded, **now)


def test_a_setting_without_an_effect_may_change(resume, caplog):
    """Older versions accepted any values of such settings."""
    resume(lambda manifest: manifest["record"]["config"].update(momentum=0.95))
    assert caplog.messages == ["momentum was 0.95 and is 0.9 now"]


def test_fields_of_a_different_version_are_rejected(resume):
    message = r"manifest.json was written by a different .*\(unknown field 'flux'\); use"
    with pytest.raises(UserError, match=message):
        resume(lambda manifest: manifest["progress"].update(flux=1))
    with pytest.raises(UserError, match="cannot resume: flux was 1 in this run"):
        resume(lambda manifest: manifest["record"]["config"].update(flux=1))
