"""`python -m lm.evaluate` as a user runs it, alone and under mpirun."""

import json
import math
import shutil

import pytest

from tests.commands import events, run_module
from tests.untrained import make_run


def evaluate(run, corpora, *arguments, **options):
    result = run_module(
        "lm.evaluate", "--run", run, "--data_path", corpora, "--json", *arguments, **options
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def alone(trained, corpora):
    return evaluate(trained, corpora, "--split", "valid,test")


def test_the_numbers_are_those_that_training_reported(trained, alone):
    valid, test = alone
    (epoch,), (tested,) = events(trained, "epoch"), events(trained, "test")
    assert valid["perplexity"] == pytest.approx(epoch["valid_perplexity"], rel=1e-9)
    assert test["perplexity"] == pytest.approx(tested["test_perplexity"], rel=1e-9)


def test_units_and_counts_agree(alone, corpora):
    for record in alone:
        text = (corpora / "embedded" / f"{record['split']}.txt").read_text()
        bits = record["nll"] / math.log(2)
        assert record["tokens"] == len(text.split()) + text.count("\n")
        assert record["characters"] == len(text)
        assert record["perplexity"] == pytest.approx(math.exp(record["nll"]))
        assert record["bits_per_word"] == pytest.approx(bits)
        assert record["bits_per_character"] == pytest.approx(bits * record["tokens"] / len(text))
        assert record["unknown"] == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_together_get_the_number_of_one(trained, alone, corpora, num_ranks):
    """3 does not divide the 20 rows; products of other sizes may round the last bits."""
    together = evaluate(
        trained, corpora, "--split", "valid,test", "--distributed", num_ranks=num_ranks, timeout=240
    )
    for one, many in zip(alone, together):
        assert many["world_size"] == num_ranks and many["tokens"] == one["tokens"]
        assert many["nll"] == pytest.approx(one["nll"], rel=1e-9)


def test_more_ranks_than_rows_leave_some_with_nothing_to_do(trained, corpora):
    alone = evaluate(trained, corpora, "--eval_batch_size", 1)
    together = evaluate(
        trained, corpora, "--eval_batch_size", 1, "--distributed", num_ranks=2, timeout=240
    )
    assert together[0]["nll"] == pytest.approx(alone[0]["nll"], rel=1e-9)


def test_rows_cost_little_and_a_file_counts_like_a_split(trained, alone, corpora):
    path = corpora / "embedded/valid.txt"
    whole, stream = (
        evaluate(trained, corpora, "--split", path, *rows)[0]
        for rows in ([], ["--eval_batch_size", 1])
    )
    assert whole["nll"] == alone[0]["nll"]
    assert stream["tokens"] == alone[0]["tokens"]
    assert stream["nll"] != whole["nll"] and stream["nll"] == pytest.approx(whole["nll"], rel=0.01)


def test_a_table_is_printed_and_unknown_words_are_counted(tmp_path, corpora):
    make_run(tmp_path / "run", corpora, vocab_size=50)
    result = run_module(
        "lm.evaluate", "--run", tmp_path / "run", "--data_path", corpora, "--checkpoint", "best"
    )
    header, _, row = result.stdout.splitlines()[-3:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert header.replace("|", " ").split()[:2] == ["split", "perplexity"]
    assert cells[0] == "valid" and int(cells[-1].replace(",", "")) > 1000


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--run", "nowhere"], "nowhere is not a run: cannot read nowhere/config.json"),
        (["--split", "dev"], "--split dev: neither train, valid, test nor a file"),
        (["--checkpoint", "nowhere"], "nowhere is not a usable checkpoint"),
    ],
)
def test_bad_input_is_one_line(trained, corpora, arguments, message):
    run = [] if "--run" in arguments else ["--run", trained]
    result = run_module("lm.evaluate", *run, "--data_path", corpora, *arguments)
    assert result.returncode == 2 and result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("lm: error: ")]
    assert message in line and "Traceback" not in result.stderr


def test_damaged_weights_are_an_error(trained, tmp_path, corpora):
    shutil.copytree(trained, tmp_path / "run")
    (data,) = (tmp_path / "run").glob("checkpoints/*/model.data*")
    data.write_bytes(data.read_bytes()[:-1])
    result = run_module("lm.evaluate", "--run", tmp_path / "run", "--data_path", corpora)
    assert result.returncode == 2
    assert "damaged" in result.stderr.splitlines()[-1]
