"""Reading and scoring sentences."""

import dataclasses

import numpy as np
import pytest

from lm.checkpoint import store
from lm.checkpoint.tensors import load_arrays, tensor_shapes, whole
from lm.config import Config
from lm.data.tokenizers import Words
from lm.data.vocabulary import Vocabulary
from lm.errors import UserError
from lm.inference.scorer import Scorer
from lm.inference.trained_run import open_run
from lm.score import format_score
from tests.untrained import write_run

WORDS = ("<eos>", "<unk>", *(f"w{i}" for i in range(30)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("runs") / "run")
    write_run(directory, Config(hidden_size=32, init_scale=0.8), Words(Vocabulary(WORDS)))
    return open_run(directory)


@pytest.fixture
def sentences():
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS[2:], length)) for length in random.integers(0, 40, 50)]


def test_a_score_does_not_depend_on_other_sentences(run, sentences):
    scorer = Scorer(run, batch_size=8)
    scores = list(scorer.score(sentences))
    assert [len(score.log_probs) for score in scores] == [len(s.split()) + 1 for s in sentences]
    for index, (score, sentence) in enumerate(zip(scores, sentences)):
        # The sentence stays in its row. The rows before it are empty.
        alone = list(scorer.score([""] * (index % 8) + [sentence]))[-1]
        assert str(alone) == str(score)


def test_a_score_depends_on_row_and_batch_size_only_by_rounding(run, sentences):
    single = Scorer(run, batch_size=1)
    for score, one in zip(Scorer(run, batch_size=8).score(sentences), single.score(sentences)):
        assert (one.text, one.unknown) == (score.text, score.unknown)
        np.testing.assert_allclose(one.log_probs, score.log_probs, rtol=1e-5)


def test_unknown_words_are_scored_as_unk_and_counted(run):
    known, unknown = Scorer(run, 2).score(["w1 <unk> w2", "w1  zebra\tw2"])
    np.testing.assert_array_equal(known.log_probs, unknown.log_probs)
    assert (known.unknown, unknown.unknown) == (0, 1)


def test_without_unk_an_unknown_word_is_an_error_after_the_lines_before_it(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=4), Words(Vocabulary(("<eos>", "a"))))
    (tmp_path / "text").write_text("a\n\na a\na zebra\na\n")
    for batch_size in (1, 2, 3, 8):
        scorer, found = Scorer(open_run(tmp_path / "run"), batch_size), []
        with open(tmp_path / "text") as file:
            with pytest.raises(UserError, match=r"^line 4 of the input: 'zebra' is not in the"):
                found.extend(scorer.score_stream(file.fileno()))
        assert [score.text for score in found] == ["a", "", "a a"]


def test_the_columns_of_the_output(run):
    (score,) = Scorer(run, 4).score(["w1 zebra"])
    cells = format_score(score, True).split("\t")
    assert float(cells[0]) == pytest.approx(score.log_prob, abs=1e-6)
    assert cells[1:4] == ["3", "1", "w1 zebra"]
    assert [float(cell) for cell in cells[4].split()] == pytest.approx(score.log_probs, abs=1e-6)
    assert format_score(score, False) == "\t".join(cells[:4])


def test_nan_is_an_error(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=4), Words(Vocabulary(WORDS)))
    trained = store.find(str(tmp_path / "run"))
    arrays = load_arrays(trained.path, tensor_shapes(trained.path))
    nothing = {name: np.full_like(array, np.nan) for name, array in arrays.items()}
    spoilt = dataclasses.replace(trained.manifest, step=8)
    store.save(str(tmp_path / "run"), [whole(nothing)], spoilt)
    with pytest.raises(UserError, match="the network returns NaN: use a different checkpoint"):
        list(Scorer(open_run(tmp_path / "run")).score(["w1"]))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_byte_order_mark_is_ignored_and_other_invalid_utf8_is_an_error(run, tmp_path, batch_size):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfw1 w2\nw3 \xff\nnever read\n")
    found = []
    with open(tmp_path / "text", "rb") as file:
        with pytest.raises(UserError, match="line 2 of the input: not UTF-8: byte 0xff"):
            found.extend(Scorer(run, batch_size).score_stream(file.fileno()))
    assert [(score.text, score.unknown) for score in found] == [("w1 w2", 0)]
