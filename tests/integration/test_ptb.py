"""The real corpus: one epoch of the small model, alone and on two ranks."""

import shutil

import pytest

from tests.commands import events, train

pytestmark = [pytest.mark.ptb, pytest.mark.timeout(1800)]

ONE_EPOCH = ("--config", "config_small", "--num_epochs", 1)
LIMIT = 600  # seconds of a run, which takes 100 alone, but shares the cores with other tests


@pytest.fixture(scope="module")
def runs(tmp_path_factory, ptb_archive):
    """One epoch on one rank, on two, and on two from a checkpoint of the first."""
    data = tmp_path_factory.mktemp("ptb")
    arguments = (*ONE_EPOCH, "--data_path", data, "--data_url", ptb_archive)
    alone, together, resumed = (tmp_path_factory.mktemp("run") / "run" for _ in range(3))
    train(alone, *arguments, "--max_steps", 1800, "--noeval", timeout=LIMIT)
    shutil.copytree(alone, resumed)
    train(alone, *arguments, "--resume", timeout=LIMIT)
    train(together, *arguments, num_ranks=2, timeout=LIMIT)
    train(resumed, *arguments, "--resume", num_ranks=2, timeout=LIMIT)
    return {
        name: events(path, "epoch")[-1]["valid_perplexity"]
        for name, path in dict(alone=alone, together=together, resumed=resumed).items()
    }


@pytest.mark.parametrize("name", ["alone", "together"])
def test_one_epoch_reaches_the_published_validation_perplexity(runs, name):
    assert 100 < runs[name] <= 185


def test_one_and_two_ranks_agree(runs):
    # Within 1 % where this was written: 0.7 %. But the first few hundred steps at learning rate
    # 1.0 are chaotic: a difference in the last bit, such as another instruction set makes even
    # on one rank, grows to a percent or two of this perplexity. See docs/distributed.md.
    assert abs(runs["together"] / runs["alone"] - 1) < 0.04


def test_two_ranks_continue_the_run_of_one(runs):
    """Past the chaotic start the runs stay together, through the last 523 steps."""
    assert abs(runs["resumed"] / runs["alone"] - 1) < 0.002
