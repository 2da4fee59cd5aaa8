"""The real corpus: one epoch of the small model, and its first steps on two ranks."""

import pytest

from tests.commands import events, train, train_here

pytestmark = [pytest.mark.ptb, pytest.mark.timeout(1200)]

# Two threads would wait for each other while other tests keep the cores busy.
FLAGS = ("--config", "config_small", "--num_epochs", 1, "--intra_op_threads", 1)
LIMIT = 600  # seconds per run, while other tests share the cores


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, ptb_archive):
    return ("--data_path", tmp_path_factory.mktemp("ptb"), "--data_url", ptb_archive)


@pytest.mark.soak  # tests/integration/test_train.py learns a smaller corpus
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_epoch_reaches_the_published_validation_perplexity(precision, corpus, tmp_path):
    flags = (*FLAGS, *corpus, "--precision", precision, "--test_on", "none")
    train(tmp_path / "run", *flags, timeout=LIMIT)
    (epoch,) = events(tmp_path / "run", "epoch")
    assert 100 < epoch["valid_perplexity"] <= 185


def test_a_run_that_moves_from_two_ranks_to_one_is_bitwise_identical(corpus, tmp_path):
    """The first steps at learning rate 1.0 are chaotic.

    A difference in the last bit doubles every three or four steps.
    """
    flags = (*FLAGS, *corpus, "--log_every_steps", 10, "--noeval")
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    train_here(alone, *flags, "--max_steps", 60)
    train(moved, *flags, "--max_steps", 40, num_ranks=2, timeout=LIMIT)
    train_here(moved, *flags, "--max_steps", 60, "--resume")
    of_one, of_both = (
        [(event["loss"], event["gradient_norm"]) for event in events(run, "step")]
        for run in (alone, moved)
    )
    assert len(of_both) == 6 and of_both == of_one
