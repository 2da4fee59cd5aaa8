"""The real corpus: one epoch of the small model."""

import pytest

from tests.commands import events, train


@pytest.mark.soak  # tests/integration/test_train.py learns a smaller corpus
@pytest.mark.ptb
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_epoch_reaches_the_published_validation_perplexity(precision, ptb_archive, tmp_path):
    train(
        tmp_path / "run", "--config", "config_small", "--num_epochs", 1, "--precision", precision,
        "--test_on", "none", "--data_path", tmp_path / "ptb", "--data_url", ptb_archive,
        "--intra_op_threads", 1,  # two threads would wait for each other beside other tests
        timeout=600,
    )  # fmt: skip
    (epoch,) = events(tmp_path / "run", "epoch")
    assert 100 < epoch["valid_perplexity"] <= 185
