"""A killed and resumed run equals an uninterrupted run."""

import shutil

import numpy as np
import pytest

from lm.checkpoint import store
from lm.checkpoint.tensors import load_arrays
from lm.data import embedded
from lm.errors import RunError, UserError
from lm.inference.evaluation import evaluate
from lm.inference.trained_run import open_run
from lm.record import has_checkpoints
from lm.schedule import has_stalled
from tests.commands import train_here
from tests.faults.jobs import check_same_run, config_flags, events, losses, run, saved_steps
from tests.untrained import rewrite_manifest

# A small model with dropout and gradient clipping.
FLAGS = ("--hidden_size", 16, "--keep_prob", 0.7, "--learning_rate", 0.5, "--seed", 3)
NUM_STEPS = 180


def test_killed_and_resumed_equals_uninterrupted(start, tmp_path, corpora):
    """Rank 0 is killed, then rank 1 of 2, then mpirun, each time between two checkpoints."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = (*FLAGS, "--max_steps", NUM_STEPS, "--checkpoint_every_steps", 25)
    flags += ("--lr_schedule", "cosine", "--warmup_steps", 30, "--eval_every_steps", 50)
    flags += ("--ema_decay", 0.9)
    train_here(whole, *config_flags(corpora), *flags, "--log_every_steps", 1)
    # Training and lm.evaluate both use the averaged weights, also within an epoch.
    assert store.find_newest(str(whole)).manifest.progress.num_averaged
    for which, split, kind in (("step-00000150", "valid", "validation"), ("last", "test", "test")):
        (found,) = evaluate(open_run(whole, which), [split], data_path=str(corpora))
        assert found["perplexity"] == events(whole, kind)[-1][f"{split}_perplexity"]
    # Each attempt uses the same command line. The first attempt starts the run.
    for num_ranks, fault in ((1, "kill:0:45"), (2, "kill:1:90"), (2, None)):
        job = start(killed, *flags, "--resume", num_ranks=num_ranks, fault=fault, forked=True)
        if not fault:
            job.wait_for_step(95)
            job.process.kill()
        code, _ = job.finish()
        assert code != 0 and saved_steps(killed)
    run(start, killed, *flags, "--resume", num_ranks=2)
    assert len(events(killed, "start")) == 4
    check_same_run(killed, whole)
    assert has_checkpoints(str(killed))
    assert [event["step"] for event in events(killed)] == list(range(1, NUM_STEPS + 1))
    assert events(killed, "epoch") and events(killed, "test")
    assert [event["step"] for event in events(killed, "validation")] == [50, 100, 150]


def test_a_finished_run_is_only_repeated_as_far_as_necessary(tmp_path, corpora):
    def train(*more):
        return train_here(tmp_path / "run", *flags, "--resume", *more)

    def files():
        paths = (tmp_path / "run").rglob("*")
        return {path: path.read_bytes() for path in paths if path.is_file()}

    flags = (*config_flags(corpora), *FLAGS, "--on_event", f"echo start >>{tmp_path}/observer")
    train("--max_steps", 8)
    before = files()
    for more in ((), ("--noeval",), ("--test_on", "none")):
        train("--max_steps", 8, *more)
        assert files() == before
    assert (tmp_path / "observer").read_text() == "start\n"
    train("--max_steps", 8, "--test_on", "best")
    train("--max_steps", 9)
    (tested,), (*_, epoch) = (events(tmp_path / "run", kind) for kind in ("test", "epoch"))
    assert tested["test_on"] == "last" and tested["step"] == epoch["step"] == 9
    assert len(events(tmp_path / "run", "start")) == 3


@pytest.fixture
def text(corpora, tmp_path):
    """A directory with a text of 20,000 tokens."""
    embedded.write_corpus(corpora / "embedded")
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        shutil.copy(corpora / "embedded/valid.txt", tmp_path / f"text/{split}.txt")
    return tmp_path / "text"


@pytest.mark.parametrize("left", ["vocabulary.txt", "tokenizer/characters.txt"])
def test_a_start_that_was_killed_before_it_wrote_the_record_can_be_repeated(tmp_path, text, left):
    run, tokenizer = tmp_path / "run", "words" if left == "vocabulary.txt" else "characters"
    (run / left).parent.mkdir(parents=True)
    (run / left).write_text("")  # the files of a tokenizer are written one after the other
    flags = (
        "--config", "config_test", "--corpus", "files", "--data_path", text, "--hidden_size", 8,
        "--max_steps", 1, "--noeval", "--resume", "--tokenizer", tokenizer, "--min_count", 2,
    )  # fmt: skip
    train_here(run, *flags)
    assert saved_steps(run) == [1]
    train_here(run, *flags, "--max_steps", 2)  # with the tokenizer of the run
    assert saved_steps(run)[-1] == 2


def test_the_state_of_optimizer_schedule_and_average_is_resumed(start, tmp_path, text):
    # The learning rate is far too high for Adam, so validation soon stalls.
    flags = (
        "--config", "config_test", "--corpus", "files", "--data_path", text,
        "--hidden_size", 8, "--batch_size", 40, "--num_epochs", 12, "--checkpoint_every_steps", 20,
        "--optimizer", "adam", "--learning_rate", 10, "--weight_decay", 0.01,
        "--lr_schedule", "plateau", "--lr_plateau_factor", 0.98, "--asgd_trigger_epochs", 1,
        "--early_stopping_epochs", 3, "--eval_batch_size", 400, "--log_every_steps", 1,
        "--eval_every_steps", 16, "--test_on", "best",
    )  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_here(whole, *flags)
    checkpoint = store.find_newest(str(whole))
    saved = checkpoint.manifest
    # Averaging starts before 3 epochs without improvement have passed.
    assert saved.progress.num_averaged and events(whole, "epoch")[-1]["learning_rate"] < 10
    perplexities = [event["valid_perplexity"] for event in events(whole, "epoch")]
    assert len(perplexities) == 12 or has_stalled(perplexities, 3)
    assert has_stalled(perplexities, 3) == ("training ends" in (whole / "log.txt").read_text())
    # lm.evaluate gives the results of the run: of the averaged weights, and of the best weights.
    (valid,) = evaluate(open_run(whole), ["valid"], data_path=str(text))
    (test,) = evaluate(open_run(whole, "best"), ["test"], data_path=str(text))
    assert valid["perplexity"] == events(whole, "epoch")[-1]["valid_perplexity"]
    assert test["perplexity"] == events(whole, "test")[0]["test_perplexity"]
    names = ["embedding", "embedding/average"]
    arrays = load_arrays(checkpoint.path, names)
    assert not np.allclose(arrays["embedding"], arrays["embedding/average"], rtol=1e-2)

    fault = f"kill:1:{saved.step - 5}"
    code, _ = start(cut, *flags, config=False, num_ranks=2, fault=fault, forked=True).finish()
    assert code != 0 and saved_steps(cut)
    train_here(cut, *flags, "--resume")
    check_same_run(cut, whole)
    assert [event["step"] for event in events(cut)] == list(range(1, saved.step + 1))


@pytest.mark.parametrize(
    "before, after",
    [(2, [1]), pytest.param(4, [1, 2, 3], marks=pytest.mark.soak)],
)
def test_a_checkpoint_resumes_on_any_number_of_ranks(start, tmp_path, corpora, before, after):
    # The checkpoint is between two step events, so the sums of the next event are resumed.
    steps = ("--checkpoint_every_steps", 30, "--log_every_steps", 4, "--noeval")
    steps += ("--optimizer", "momentum", "--momentum", 0.5)
    whole, flags = tmp_path / "whole", (*FLAGS, *steps, "--max_steps", 130)
    run(start, whole, *flags, "--keep_checkpoints", 9, num_ranks=before)
    first, *later = saved_steps(whole)
    assert first == 30 and later
    for num_ranks in after:
        resumed = tmp_path / str(num_ranks)
        shutil.copytree(whole, resumed)
        for step in later:
            shutil.rmtree(resumed / f"checkpoints/step-{step:08d}")
        saved = store.find_newest(str(resumed)).manifest
        tokens = 4 * saved.record.config["batch_size"] * saved.record.config["num_steps"]
        if num_ranks == 1:
            train_here(resumed, *config_flags(corpora), *flags, "--resume")
        else:
            run(start, resumed, *flags, "--resume", num_ranks=num_ranks)
        rtol = 1e-4 if 3 in (before, num_ranks) else 0  # 3 does not divide virtual_ranks
        np.testing.assert_allclose(losses(resumed), losses(whole), rtol=rtol)
        (event,) = [event for event in events(resumed) if event["step"] == 32]
        exchange_seconds = event["exchange_share"] * tokens / event["tokens_per_second"]
        assert exchange_seconds >= 0.999 * saved.progress.event_exchange_seconds > 0


def test_a_second_job_in_the_same_directory_is_rejected(start, tmp_path, corpora, monkeypatch):
    monkeypatch.setattr("lm.checkpoint.run_dir._LOCK_SECONDS", 0)
    first = start(tmp_path, "--hidden_size", 8, "--num_epochs", 100, forked=True)
    first.wait_for_step(5)
    with pytest.raises(RunError, match="another job is using output_dir"):
        train_here(tmp_path, *config_flags(corpora), "--hidden_size", 8, "--resume")
    assert first.process.poll() is None


def test_init_from_loads_only_the_weights(tmp_path, corpora, caplog):
    few = (*config_flags(corpora), "--hidden_size", 8, "--log_every_steps", 1, "--noeval")
    train_here(tmp_path / "first", *few, "--max_steps", 100)
    (saved,) = (tmp_path / "first" / "checkpoints").iterdir()
    other = ("--init_from", saved, "--max_steps", 5)
    train_here(tmp_path / "warm", *few, *other, "--seed", 7)
    warm = losses(tmp_path / "warm")
    untrained = losses(tmp_path / "first")[0][1]
    assert warm[0][0] == 1 and warm[0][1] < untrained - 0.2
    for flags, words in [
        (("--hidden_size", 9), r"shape \[201, 8\] in .*, but \[201, 9\] in .* --init_partly"),
        (("--tie_weights",), "has softmax/weights, which this model does not use; --init_partly"),
        (("--checkpoint", "best"), "--checkpoint is for runs, but .* is a checkpoint: remove it"),
        (("--init_from", tmp_path / "none"), "is neither a run, a checkpoint of a run nor"),
        (("--init_rename", "a=b"), "--init_rename is for TF 1.x checkpoints, but .* is a run"),
    ]:
        with pytest.raises(UserError, match=words):
            train_here(tmp_path / "bad", *few, *other, *flags)
        assert not (tmp_path / "bad").exists()
    with pytest.raises(UserError, match="--checkpoint needs --init_from"):
        train_here(tmp_path / "bad", *few, "--checkpoint", "best")
    with pytest.raises(UserError, match="first started without --init_from, which has no effect"):
        train_here(tmp_path / "first", *few, *other, "--resume")
    resumed = (*few, "--max_steps", 6, "--seed", 7, "--resume", "--init_from")
    train_here(tmp_path / "warm", *resumed, tmp_path / "first")
    assert "has no effect" not in caplog.text
    train_here(tmp_path / "warm", *resumed, tmp_path / "warm")
    assert f"--init_from has no effect: the run started from {saved}" in caplog.text


def test_all_ranks_can_test_the_best_weights(start, tmp_path, corpora):
    flags = (*config_flags(corpora), "--hidden_size", 8, "--checkpoint_every_steps", 20)
    train_here(tmp_path, *flags, "--max_steps", 40, "--test_on", "none")
    first = store.list_checkpoints(str(tmp_path))[0]

    def validate(content):
        content["progress"].update(valid_perplexity=1.5, valid_steps=[20])

    rewrite_manifest(first, validate)
    flags += ("--max_steps", 60, "--resume", "--test_on", "best", "--distributed_eval")
    run(start, tmp_path, *flags, num_ranks=2)
    best, last = (
        evaluate(open_run(tmp_path, which), ["test"], data_path=str(corpora))[0]["perplexity"]
        for which in (first, "last")
    )
    assert events(tmp_path, "test")[0]["test_perplexity"] == best != last


def test_training_ends_early_without_improvement_and_resumes_with_a_higher_limit(tmp_path, corpora):
    # No weight changes. An equal perplexity is not an improvement.
    flags = (*config_flags(corpora), "--hidden_size", 8, "--batch_size", 800)
    flags += ("--num_epochs", 4, "--learning_rate", 1e-30, "--init_scale", 1)
    train_here(tmp_path, *flags, "--early_stopping_epochs", 1)
    assert [event["epoch"] for event in events(tmp_path, "epoch")] == [1, 2]
    assert len(events(tmp_path, "test")) == 1
    assert "no longer improves" in events(tmp_path, "end")[-1]["reason"]
    train_here(tmp_path, *flags, "--early_stopping_epochs", 2, "--resume")
    epochs = events(tmp_path, "epoch")
    assert [event["epoch"] for event in epochs] == [1, 2, 3]
    # Each epoch starts with a state of zeros, so large equal weights have equal losses.
    assert len({event["train_perplexity"] for event in epochs}) == 1


def test_the_best_weights_within_an_epoch_are_saved(tmp_path, corpora):
    # No weight changes. An equal perplexity is not an improvement.
    flags = ("--hidden_size", 8, "--learning_rate", 1e-30, "--eval_every_steps", 5)
    train_here(tmp_path, *config_flags(corpora), *flags, "--max_steps", 12, "--test_on", "none")
    assert [event["step"] for event in events(tmp_path, "validation")] == [5, 10]
    assert saved_steps(tmp_path) == [5, 12]
