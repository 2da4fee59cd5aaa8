"""One run, any number of ranks: the same losses with dropout on, whatever N divides."""

import numpy as np
import pytest

from tests.commands import events, train

# 4 does not divide 10, nor does 3; dropout is on; the norm is clipped at almost every step.
CONFIG = (
    "--config", "config_test", "--batch_size", 10, "--keep_prob", 0.6, "--max_grad_norm", 2,
    "--learning_rate", 0.5, "--max_steps", 100, "--log_every_steps", 1,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpora):
    def run_on(num_ranks):
        output_dir = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        arguments = (*CONFIG, "--data_path", corpora)
        train(output_dir, *arguments, num_ranks=num_ranks, timeout=180)
        return output_dir

    return run_on


@pytest.fixture(scope="module")
def alone(run):
    return run(1)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_losses_and_perplexities_equal_those_of_one_rank(run, alone, num_ranks):
    together = run(num_ranks)
    losses = [[event["loss"] for event in events(each, "step")] for each in (alone, together)]
    assert len(losses[0]) == 100
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    for kind, name in [
        ("epoch", "train_perplexity"), ("epoch", "valid_perplexity"), ("test", "test_perplexity")
    ]:  # fmt: skip
        values = [events(each, kind)[0][name] for each in (alone, together)]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-4)
    assert events(together, "epoch")[0]["world_size"] == num_ranks


def test_the_seed_makes_the_run(run, alone, tmp_path, corpora):
    train(tmp_path, *CONFIG, "--data_path", corpora, "--seed", 2, "--max_steps", 20, "--noeval")
    ours, other = (events(each, "step")[19]["loss"] for each in (alone, tmp_path))
    assert abs(ours - other) > 1e-3
