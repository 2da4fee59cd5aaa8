"""User-defined networks are bitwise identical on any number of ranks and threads."""

import numpy as np
import pytest

from lm.config_file import load_config_file
from tests.commands import ROOT, events, train_together
from tests.using_a_run import check_commands_agree

NETWORKS = {  # config files and flags
    # A network without state that defines its losses and its update.
    "convolution": (ROOT / "tests/networks/convolution.py", "--window_order", "shuffled"),
    # With 200 units, the results depend on the size of TensorFlow's intra-op pool.
    "gru": (ROOT / "configs/config_gru.py", "--num_steps", 5),
}
TRANSFORMER = {
    "transformer in bfloat16": (
        ROOT / "configs/config_transformer.py", "--hidden_size", 16, "--num_layers", 1,
        "--num_steps", 7, "--warmup_steps", 0, "--precision", "bfloat16",
    ),
}  # fmt: skip
STEPS = 8
FLAGS = (
    "--corpus", "files", "--resume", "--log_every_steps", 1, "--checkpoint_every_steps", STEPS // 2,
    "--distributed_eval", "--nocheck_network",
)  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A directory with short texts of 200 words: evaluating longer texts takes most of the time."""
    path, random = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    words = [a + b + c for a in "bdfgklmnpr" for b in "aeiou" for c in "lnst"]
    for split, num_lines in {"train": 1000, "valid": 50, "test": 50}.items():
        lines = (" ".join(random.choice(words, random.integers(1, 20))) for _ in range(num_lines))
        (path / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
    return path


def results(run):
    """Return all numbers of a run that do not depend on time, and the bytes of its weights."""
    names = ("step", "loss", "gradient_norm", "valid_perplexity", "test_perplexity")
    numbers = [
        {name: event.get(name) for name in names}
        for kind in ("step", "epoch", "test")
        for event in events(run, kind)
        if kind == "step" or event["step"] == STEPS  # the first half ends with an evaluation too
    ]
    (weights,) = run.glob(f"checkpoints/step-{STEPS:08}/model.data*")
    return numbers, weights.read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, texts):
    """Train all networks on one rank with three threads, and on 4 ranks and then on this rank."""
    parent = tmp_path_factory.mktemp("runs")
    for num_ranks, threads, started in [
        (4, 1, {"ranks": STEPS // 2}),
        (1, 3, {"ranks": STEPS, "alone": STEPS}),
    ]:
        runs = [
            (
                *FLAGS, "--data_path", texts, "--output_dir", parent / run / name, "--max_steps",
                steps, "--intra_op_threads", threads, "--config", *flags,
            )
            for run, steps in started.items()
            for name, flags in {**NETWORKS, **TRANSFORMER}.items()
        ]  # fmt: skip
        train_together(runs, num_ranks=num_ranks, timeout=300)
    return parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*NETWORKS, *TRANSFORMER])
def test_a_network_does_not_depend_on_ranks_threads_or_a_resume(trained, name):
    assert results(trained / "ranks" / name) == results(trained / "alone" / name)
    for event in events(trained / "ranks" / name, "start"):
        assert event["exact"].startswith("yes: bitwise identical on any power of two up to")


def test_the_summary_recommends_fewer_micro_batches(trained):
    log = (trained / "ranks/gru/log.txt").read_text()
    batches = [line for line in log.splitlines() if "per micro-batch" in line]
    # Four ranks compute the four micro-batches at the same time, but three threads do not.
    assert ["fewer --virtual_ranks" in line for line in batches] == [False, True]


@pytest.mark.parametrize("name", NETWORKS)
def test_all_commands_agree(trained, name, tmp_path, texts):
    functions = load_config_file(str(NETWORKS[name][0])).functions
    check_commands_agree(trained / "ranks" / name, functions, texts, tmp_path, "test.txt")
