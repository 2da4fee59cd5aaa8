"""lm.evaluate in one process and under mpirun."""

import json
import shutil

import pytest

from lm import kernels
from lm.inference.evaluation import evaluate
from lm.inference.trained_run import open_run
from tests.commands import events, run_module
from tests.untrained import make_run, rewrite_manifest


def run_evaluate(run, *arguments, **options):
    result = run_module("lm.evaluate", "--run", run, "--json", *arguments, **options)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def single(trained, corpora):
    """Results of both splits, and of the validation text as a file."""
    path = corpora / "embedded/valid.txt"
    return run_evaluate(trained, "--split", f"valid,test,{path}")


@pytest.fixture(scope="module")
def stream(trained, corpora):
    """The result of the validation text as one stream."""
    path = corpora / "embedded/valid.txt"
    return evaluate(open_run(trained), [str(path)], eval_batch_size=1)[0]


def test_perplexities_agree_with_training(trained, single):
    valid, test, _ = single
    (epoch,), (tested,) = events(trained, "epoch"), events(trained, "test")
    assert valid["perplexity"] == epoch["valid_perplexity"]
    assert test["perplexity"] == tested["test_perplexity"]


@pytest.mark.parametrize(
    "num_ranks, rows",
    [
        (3, 2),  # one rank has no rows
        pytest.param(3, 20, marks=pytest.mark.soak),
        pytest.param(2, 20, marks=pytest.mark.soak),
    ],
)
def test_several_ranks_compute_the_result_of_one(trained, num_ranks, rows):
    splits = ["valid", "test"]
    several = run_evaluate(
        trained, "--split", ",".join(splits), "--eval_batch_size", rows,
        num_ranks=num_ranks, timeout=240,
    )  # fmt: skip
    alone = evaluate(open_run(trained), splits, eval_batch_size=rows)
    for one, many in zip(alone, several, strict=True):
        assert many["world_size"] == num_ranks and many["tokens"] == one["tokens"]
        # TensorFlow's products of different sizes are rounded differently.
        tolerance = 0 if kernels.available() else 1e-9
        assert many["nll"] == pytest.approx(one["nll"], rel=tolerance, abs=0)


def test_lines_on_two_ranks_have_the_result_of_one(trained, corpora, tmp_path):
    text = (corpora / "embedded/valid.txt").read_text().splitlines()[:50]
    (tmp_path / "text.txt").write_text("\n".join(text))
    (two,) = run_evaluate(trained, "--split", tmp_path / "text.txt", "--lines", num_ranks=2)
    (one,) = evaluate(open_run(trained), [str(tmp_path / "text.txt")], lines=True)
    assert (two["nll"], two["tokens"]) == (one["nll"], one["tokens"]) and two["world_size"] == 2


def test_a_file_counts_like_a_split_and_the_row_count_matters_little(single, stream):
    whole = single[2]
    assert whole["nll"] == single[0]["nll"]
    assert stream["tokens"] == single[0]["tokens"]
    assert stream["nll"] != whole["nll"] and stream["nll"] == pytest.approx(whole["nll"], rel=0.01)


def test_the_table_counts_unknown_words(tmp_path, corpora):
    make_run(tmp_path / "run", corpora, vocab_size=50)
    shutil.copy(corpora / "embedded/valid.txt", tmp_path / "é|.txt")
    result = run_module(
        "lm.evaluate", "--run", tmp_path / "run", "--checkpoint", "best", "--split",
        f"valid,{tmp_path}/é|.txt", env={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    note, _, header, _, row, of_file = result.stdout.splitlines()[-6:]
    assert note.endswith("comparable only where unknown is 0.")
    # The | in the name does not end the cell.
    assert of_file.split()[1] == f"{tmp_path}/é\\|.txt" and of_file.split()[2:] == row.split()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert header.replace("|", " ").split()[:2] == ["split", "perplexity"]
    assert cells[0] == "valid" and int(cells[-1].replace(",", "")) > 1000


def test_all_ranks_evaluate_the_checkpoint_of_rank_0(tmp_path, corpora):
    """The run saves a checkpoint after rank 0 has opened the run."""
    run, hidden = tmp_path / "run", tmp_path / "step-00000008"
    make_run(run, corpora)
    make_run(tmp_path / "other", corpora, seed=2)
    (tmp_path / "other/checkpoints/step-00000007").rename(hidden)
    manifest = json.loads((run / "checkpoints/step-00000007/manifest.json").read_text())
    rewrite_manifest(hidden, lambda content: content.update(record=manifest["record"]))
    rewrite_manifest(hidden, lambda content: content["progress"].update(step=8))
    result = run_module(
        "tests.faults.inject", f"new_checkpoint:{hidden}:{run}/checkpoints/step-00000008", "--run",
        run, "--split", "test", "--data_path", corpora, "--json",
        num_ranks=2, env={"INJECT_INTO": "lm.evaluate"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["checkpoint"].endswith("step-00000007")
    assert not hidden.exists()
