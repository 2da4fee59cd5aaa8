"""Runs are bitwise identical on 1, 2, 4 and 8 ranks, and equal up to rounding on 3."""

import functools
import re

import numpy as np
import pytest

from lm import kernels
from lm.report.comparison import MEASURED
from tests import fork_server
from tests.commands import (
    environment,
    events,
    mpirun,
    run_command,
    train,
    train_here,
    train_together,
)

pytestmark = pytest.mark.timeout(1800)  # the first test trains most runs

# Neither 3 nor 4 divides the batch size of 10. Dropout is on. The norm is clipped at almost every
# step. Validation is distributed, except on two ranks.
CONFIG = (
    "--config", "config_test", "--batch_size", 10, "--keep_prob", 0.6, "--max_grad_norm", 2,
    "--learning_rate", 0.5, "--max_steps", 20, "--log_every_steps", 1, "--eval_batch_size", 101,
)  # fmt: skip
# In some steps, a cluster has no words in the rows of a rank, or of all ranks.
ADAPTIVE = (
    *CONFIG, "--max_steps", 15, "--test_on", "none", "--adaptive_softmax_cutoffs", "20,30,31,100",
)  # fmt: skip
RUNS = {  # rank counts and flags
    "default": ((1, 2, 3, 4, 8), CONFIG),
    # With a small vocabulary, TensorFlow's optimizer must keep the tree of sums.
    "embedding exchanged as a table": (
        (1, 2), (*CONFIG, "--vocab_size", 50, "--max_steps", 10, "--noeval"),
    ),
    # One rank updates the rows of the embedding in a different order than four ranks.
    "adagrad": (
        (1, 4), (*CONFIG, "--max_steps", 15, "--noeval", "--optimizer", "adagrad"),
    ),
    # Weight masks and tied weights give the same gradients on any number of ranks.
    "all model fields, an average of the weights and resets of the state": (
        (1, 2),
        (
            *CONFIG, "--num_steps_total", 15, "--tie_weights", "--embedding_size", 24,
            "--embedding_keep_prob", 0.7, "--output_keep_prob", 0.8, "--recurrent_keep_prob", 0.6,
            "--locked_dropout", "--forget_bias", 1, "--activation_penalty", 2,
            "--temporal_activation_penalty", 1, "--embedding_init_scale", 0.2, "--ema_decay", 0.9,
            "--lr_schedule", "cosine", "--lr_min_ratio", 0.1, "--reset_state", "line",
            "--eval_batch_size", 400, "--sample_every_steps", 5,
        ),
    ),
    "adaptive softmax in bfloat16": ((1, 4), (*ADAPTIVE, "--precision", "bfloat16")),
    "adaptive input": (
        (1, 4),
        (
            *ADAPTIVE, "--adaptive_input", "--tie_weights", "--embedding_size", 24,
            "--optimizer", "adagrad",
        ),
    ),
    # A saturated network has subnormal gradients, even before the last sum over 4 ranks.
    "subnormal numbers": (
        (1, 4),
        (
            "--config", "config_test", "--max_steps", 4, "--noeval", "--optimizer", "momentum",
            "--momentum", 0, "--init_scale", 10, "--batch_size", 16, "--num_steps", 1,
            "--hidden_size", 256, "--max_grad_norm", "inf", "--learning_rate", 1e-6,
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, corpora):
    """Return a function that trains all runs of a number of ranks and returns their directory."""
    root = tmp_path_factory.mktemp("ranks")

    @functools.cache
    def train_on(num_ranks):
        evaluation = "--nodistributed_eval" if num_ranks == 2 else "--distributed_eval"
        common = ("--data_path", corpora, evaluation)
        runs = [
            ("--output_dir", root / str(num_ranks) / name, *flags, *common)
            for name, (counts, flags) in RUNS.items()
            if num_ranks in counts
        ]
        train_together(runs, num_ranks=num_ranks, timeout=600, forked=num_ranks != 2)
        return root / str(num_ranks)

    return train_on


@pytest.mark.parametrize(
    "name, num_ranks",
    [(name, n) for name, (counts, _) in RUNS.items() for n in counts if n not in (1, 3)],
)
def test_runs_on_a_power_of_two_of_ranks_are_bitwise_identical(ranks, name, num_ranks):
    together, alone = ranks(num_ranks) / name, ranks(1) / name
    check_same_bits(together, alone)
    for event in events(together, "start"):
        assert event["exact"].startswith("yes: bitwise identical on any power of two up to ")


def check_same_bits(ours, theirs):
    assert numbers(ours) == numbers(theirs)
    steps = sorted(path.name for path in (theirs / "checkpoints").glob("step-*"))
    assert steps
    for step in steps:
        for path in (theirs / "checkpoints" / step).glob("model.*"):
            other = ours / "checkpoints" / step / path.name
            assert other.read_bytes() == path.read_bytes(), f"{step}/{path.name}"


def numbers(output_dir):
    """Return the fields of all events of a run, unrounded, except measured values."""
    kinds = "step", "validation", "epoch", "test", "sample"
    found = [event for kind in kinds for event in events(output_dir, kind)]
    return [{name: event[name] for name in event.keys() - MEASURED} for event in found]


def test_three_ranks_are_equal_up_to_rounding(ranks):
    together, alone = ranks(3) / "default", ranks(1) / "default"
    losses = [[event["loss"] for event in events(each, "step")] for each in (alone, together)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert len(losses[0]) == 20
    assert "3 ranks do not divide virtual_ranks 8" in events(together, "start")[0]["exact"]


def test_the_seed_determines_the_run(ranks, tmp_path, corpora):
    few = ("--max_steps", 20, "--noeval")
    train_here(tmp_path, *CONFIG, "--data_path", corpora, "--seed", 2, *few)
    ours, other = (events(each, "step")[19]["loss"] for each in (ranks(1) / "default", tmp_path))
    assert abs(ours - other) > 1e-3


@pytest.mark.soak
@pytest.mark.ptb
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", ["small", "medium", "large"])
def test_300_steps_of_each_config_are_bitwise_identical(tmp_path, ptb_archive, config, precision):
    flags = (
        "--config", f"config_{config}", "--precision", precision, "--max_steps", 300,
        "--keep_prob", {"small": 0.5, "medium": 0.5, "large": 0.35}[config],
        "--log_every_steps", 1, "--checkpoint_every_steps", 100, "--distributed_eval",
        "--data_path", tmp_path / "data", "--data_url", ptb_archive,
    )  # fmt: skip
    for num_ranks in (1, 2, 4, 8):
        train(tmp_path / str(num_ranks), *flags, num_ranks=num_ranks, timeout=3600)
        check_same_bits(tmp_path / str(num_ranks), tmp_path / "1")


def test_a_different_summation_order_is_detected(tmp_path, corpora):
    """Detection does not rely on settings: all settings that this program checks are correct."""
    flags = ("--config", "config_test", "--data_path", corpora, "--max_steps", 1, "--noeval")
    flags += ("--output_dir", tmp_path)
    python = fork_server.python()
    command = [*mpirun(4), "-mca", "coll", "^tuned", *python, "-m", "lm.train", *flags]
    result = run_command(command, environment(), timeout=120)
    assert result.returncode == 0, result.stderr
    assert events(tmp_path, "start")[0]["exact"].startswith("no: the exchange adds up ")


def test_a_run_with_inexact_first_steps_stays_inexact(tmp_path, corpora):
    if " generic " in kernels.description():
        pytest.skip("this CPU has one instruction set only")
    flags = ("--config", "config_test", "--data_path", corpora, "--noeval", "--num_steps", 5)
    flags += ("--resume",)
    few = ("--output_dir", tmp_path / "run", *flags, "--max_steps", 3)
    train_together([few], env={"LM_KERNELS_ISA": "generic"})
    for num_steps in (4, 5):
        train_here(tmp_path / "run", *flags, "--max_steps", num_steps)
    found = [re.split(r"; | \(", event["exact"])[0] for event in events(tmp_path / "run", "start")]
    assert found == [
        "yes: bitwise identical on any power of two up to 8 ranks",
        "no: the steps up to 3 were computed with compiled ops for generic",
        "no: the steps up to 4 are not exact",
    ]
