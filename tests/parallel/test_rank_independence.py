"""One run, any number of ranks: bit for bit on 1, 2, 4 and 8, up to rounding on others."""

import numpy as np
import pytest

from tests.commands import events, train

# 4 does not divide 10, nor does 3; dropout is on; the norm is clipped at almost every step;
# validation is shared.
CONFIG = (
    "--config", "config_test", "--batch_size", 10, "--keep_prob", 0.6, "--max_grad_norm", 2,
    "--learning_rate", 0.5, "--max_steps", 100, "--log_every_steps", 1, "--distributed_eval",
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


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.soak), 8])
def test_the_run_of_a_power_of_two_of_ranks_is_that_of_one_bit_for_bit(run, alone, num_ranks):
    together = run(num_ranks)
    assert numbers(together) == numbers(alone)
    assert len(numbers(together)) == 100 + 1 + 1
    for name in ("model.index", "model.data-00000-of-00001"):
        ours, theirs = (each / "checkpoints/step-00000100" / name for each in (together, alone))
        assert ours.read_bytes() == theirs.read_bytes()
    assert events(together, "start")[0]["exact"].startswith("yes: the same bits")


def test_so_is_one_whose_embedding_is_exchanged_as_a_table(tmp_path, corpora):
    """With few words; TensorFlow's optimizer must not make one sum of the tree of the shares."""
    few = (*CONFIG, "--vocab_size", 50, "--max_steps", 10, "--noeval", "--data_path", corpora)
    for num_ranks in (1, 2):
        train(tmp_path / str(num_ranks), *few, num_ranks=num_ranks)
    assert numbers(tmp_path / "2") == numbers(tmp_path / "1")


def numbers(output_dir):
    """What the events of a run say about the model, whole."""
    names = ("loss", "gradient_norm", "train_perplexity", "valid_perplexity", "test_perplexity")
    kinds = ("step", "epoch", "test")
    every = [event for kind in kinds for event in events(output_dir, kind)]
    return [{name: event[name] for name in names if name in event} for event in every]


def test_three_ranks_are_equal_up_to_rounding(run, alone):
    together = run(3)
    losses = [[event["loss"] for event in events(each, "step")] for each in (alone, together)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert "3 ranks do not divide virtual_ranks 8" in events(together, "start")[0]["exact"]


def test_the_seed_makes_the_run(run, alone, tmp_path, corpora):
    train(tmp_path, *CONFIG, "--data_path", corpora, "--seed", 2, "--max_steps", 20, "--noeval")
    ours, other = (events(each, "step")[19]["loss"] for each in (alone, tmp_path))
    assert abs(ours - other) > 1e-3
