"""Reading sentences as they come, and scoring them."""

import json
import os

import numpy as np
import pytest

from lm.checkpoint import format as checkpoint
from lm.cli.flags import Flags
from lm.config import Config
from lm.data.vocabulary import Vocabulary
from lm.errors import UserError
from lm.inference.run import Run, define_run_flags
from lm.inference.scorer import Scorer, read_lines, run_scoring
from tests.untrained import write_run

WORDS = ("<eos>", "<unk>", *(f"w{i}" for i in range(30)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("runs") / "run")
    config = Config(hidden_size=32, init_scale=0.8)
    write_run(directory, config, Vocabulary(WORDS))
    return Run(directory, config, Vocabulary(WORDS), checkpoint.find(directory))


@pytest.fixture
def sentences():
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS[2:], length)) for length in random.integers(0, 40, 50)]


def test_a_score_does_not_depend_on_the_sentences_beside_it(run, sentences):
    scorer = Scorer(run, batch_size=8)
    together = list(scorer.score(sentences))
    alone = [score for sentence in sentences for score in scorer.score([sentence])]
    assert [s.as_tsv(per_word=True) for s in together] == [s.as_tsv(per_word=True) for s in alone]
    assert [len(score.log_probs) for score in together] == [len(s.split()) + 1 for s in sentences]


def test_nor_on_the_size_of_the_batch(run, sentences):
    for one, other in zip(Scorer(run, 1).score(sentences), Scorer(run, 16).score(sentences)):
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=1e-5)


def test_probabilities_of_all_continuations_sum_to_one(run):
    scores = Scorer(run, 16).score(f"w1 {word}" for word in WORDS[1:])
    ending, *others = [s.log_probs for s in [*Scorer(run, 16).score(["w1"]), *scores]]
    assert np.exp(ending[1]) + sum(np.exp(s[1]) for s in others) == pytest.approx(1, abs=1e-5)


def test_unknown_words_are_scored_as_unk_and_counted(run):
    known, unknown = Scorer(run, 2).score(["w1 <unk> w2", "w1  zebra\tw2"])
    np.testing.assert_array_equal(known.log_probs, unknown.log_probs)
    assert (known.unknown, unknown.unknown) == (0, 1)


def test_without_unk_the_lines_before_an_unknown_word_are_scored_and_its_line_is_named(
    tmp_path, monkeypatch, capsys
):
    write_run(tmp_path / "run", Config(hidden_size=4), Vocabulary(("<eos>", "a")))
    (tmp_path / "text").write_text("a\n\na a\na zebra\na\n")
    flags = Flags("test")
    define_run_flags(flags)
    for plain_type, name in ((bool, "per_word"), (bool, "json"), (int, "batch_size")):
        flags.define(plain_type, name, plain_type(), "")
    for batch_size in (1, 2, 3, 8):
        flags.parse(["lm.score", "--run", str(tmp_path / "run"), f"--batch_size={batch_size}"])
        with open(tmp_path / "text") as file:
            monkeypatch.setattr("sys.stdin", file)
            with pytest.raises(UserError, match=r"^line 4 of the input: 'zebra' is not in the"):
                run_scoring(flags)
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("\t")[3] for line in lines] == ["a", "", "a a"]


def test_formats(run):
    (score,) = Scorer(run, 4).score(["w1 zebra"])
    cells = score.as_tsv(per_word=True).split("\t")
    assert float(cells[0]) == pytest.approx(score.log_prob, abs=1e-6)
    assert cells[1:4] == ["3", "1", "w1 zebra"]
    assert [float(cell) for cell in cells[4].split()] == pytest.approx(score.log_probs, abs=1e-6)
    assert score.as_tsv(per_word=False) == "\t".join(cells[:4])
    record = json.loads(score.as_json(per_word=True))
    assert [each["word"] for each in record["words"]] == ["w1", "zebra", "<eos>"]
    assert record["log_probability"] == float(cells[0])
    assert "words" not in json.loads(score.as_json(per_word=False))


def test_lines_come_as_soon_as_they_are_whole():
    read_end, write_end = os.pipe()
    lines = read_lines(read_end)
    os.write(write_end, b"one\ntwo\nthr")
    assert next(lines) == ["one", "two"]
    os.write(write_end, "ée\n\nlast".encode())
    assert next(lines) == ["thrée", ""]
    os.close(write_end)
    assert list(lines) == [["last"]]
    os.close(read_end)


def test_a_line_that_is_not_utf8_is_an_error_after_the_lines_before_it(tmp_path):
    (tmp_path / "text").write_bytes(b"good\nbad \xff\nnever read\n")
    with open(tmp_path / "text", "rb") as file:
        lines = read_lines(file.fileno())
        assert next(lines) == ["good"]
        with pytest.raises(UserError, match="line 2 of the input is not UTF-8: byte 0xff"):
            next(lines)
