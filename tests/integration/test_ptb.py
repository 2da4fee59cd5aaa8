"""The real corpus: one epoch of the small model, alone and on two ranks."""

import pytest

from tests.commands import events, train

pytestmark = [pytest.mark.ptb, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def perplexity(tmp_path_factory, ptb_archive):
    data = tmp_path_factory.mktemp("ptb")
    found = {}
    for num_ranks in (1, 2):
        output_dir = tmp_path_factory.mktemp("run")
        train(
            output_dir, "--config", "config_small", "--num_epochs", 1, "--data_path", data,
            "--data_url", ptb_archive, num_ranks=num_ranks, timeout=400,
        )  # fmt: skip
        found[num_ranks] = events(output_dir, "epoch")[0]["valid_perplexity"]
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_epoch_reaches_the_published_validation_perplexity(perplexity, num_ranks):
    assert 100 < perplexity[num_ranks] <= 185


def test_one_and_two_ranks_agree(perplexity):
    assert abs(perplexity[2] / perplexity[1] - 1) < 0.01
