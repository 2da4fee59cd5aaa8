"""User-defined networks are bitwise identical on any number of ranks and threads."""

import pathlib

import pytest

from tests.commands import ROOT, events, train

NETWORKS = ROOT / "tests/networks"
FLAGS = ("--log_every_steps", 1, "--checkpoint_every_steps", 10, "--distributed_eval")


def results(run):
    """Return all numbers of a run that do not depend on time, and the bytes of its weights."""
    names = ("step", "loss", "gradient_norm", "valid_perplexity", "test_perplexity")
    numbers = [
        {name: event.get(name) for name in names}
        for kind in ("step", "epoch", "test")
        for event in events(run, kind)
    ]
    (weights,) = pathlib.Path(run).glob(f"checkpoints/step-{numbers[-1]['step']:08}/model.data*")
    return numbers, weights.read_bytes()


def train_network(run, name, max_steps, num_ranks, threads, *flags):
    flags = ("--config", NETWORKS / f"{name}.py", "--max_steps", max_steps, *FLAGS, *flags)
    result = train(run, *flags, "--intra_op_threads", threads, num_ranks=num_ranks, timeout=200)
    assert "exact       yes: bitwise identical on any power of two up to 8" in result.stderr


@pytest.mark.parametrize("name", ["ngram", "char_cnn", "gated_cnn"])
def test_a_network_does_not_depend_on_ranks_threads_or_a_resume(tmp_path, corpora, name):
    flags = ("--data_path", corpora)
    train_network(tmp_path / "alone", name, 20, 1, 3, *flags)
    train_network(tmp_path / "ranks", name, 10, 4, 1, *flags, "--test_on", "none")
    train_network(tmp_path / "ranks", name, 20, 2, 1, *flags, "--resume")
    (numbers, weights), (expected, expected_weights) = map(
        results, (tmp_path / "ranks", tmp_path / "alone")
    )
    # The validation after the first ten steps is an additional event.
    assert [n for n in numbers if n["step"] != 10 or n["loss"]] == expected
    assert weights == expected_weights
