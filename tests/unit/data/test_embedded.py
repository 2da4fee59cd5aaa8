"""The embedded corpus: its known perplexity is correct, and its text is the same everywhere."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from lm.data import embedded
from lm.data.splits import SPLITS
from lm.errors import UserError
from lm.files import sha256_of
from tests.commands import run_code

SMALL = embedded.LanguageOptions(num_words=30, num_successors=4, num_tokens=3000, eval_tokens=500)
pytestmark = pytest.mark.timeout(60)

KNOWN = (7.033447, 7.055869)  # the perplexities of the default language
OTHER = dataclasses.replace(SMALL, seed=2)


def _tokens(path):
    """Read a text as the corpus loader does, with `<eos>` at the end of each line."""
    return [t for line in path.read_text("utf-8").splitlines() for t in [*line.split(), "<eos>"]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus") / "d"
    return directory, embedded.write_corpus(directory)


@pytest.fixture(scope="module")
def language():
    return embedded.random_language(seed=1, num_words=200, num_successors=8)


def _transitions(language):
    """Return P [S, S], where P[i, j] is the probability of state j after state i."""
    chain = np.zeros((len(language.successors), len(language.successors)))
    np.put_along_axis(chain, language.successors, language.probabilities, axis=1)
    return chain


def _sample(language, min_tokens, seed=0):
    rng = np.random.Generator(np.random.PCG64(seed))
    return list(itertools.chain.from_iterable(embedded.sample_states(language, rng, min_tokens)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_words", "num_successors"), [(2, 2), (5, 5), (40, 3), (300, 8)])
def test_transitions_form_a_sparse_irreducible_chain(seed, num_words, num_successors):
    language = embedded.random_language(seed, num_words, num_successors)
    chain = _transitions(language)
    np.testing.assert_allclose(chain.sum(axis=1), 1.0, rtol=1e-12)
    assert ((chain > 0).sum(axis=1) == num_successors).all()
    assert chain[embedded.EOS, embedded.EOS] == 0  # no empty lines
    reached = np.eye(num_words + 1) + (chain > 0)
    for _ in range(math.ceil(math.log2(num_words + 1))):
        reached = np.minimum(reached @ reached, 1.0)
    assert (reached > 0).all()
    assert sorted(language.cycle) == list(range(num_words + 1))
    assert (chain[np.roll(language.cycle, 1), language.cycle] > 0).all()
    assert language.cycle[-1] == embedded.EOS


@pytest.mark.parametrize("block", [10_000, 64])
def test_sample_ends_with_the_sentence_that_reaches_the_minimum(language, monkeypatch, block):
    expected = _sample(language, 1000)
    monkeypatch.setattr(embedded, "BLOCK_TOKENS", block)
    states = _sample(language, 1000)
    assert states == expected and len(states) >= 1000
    assert states[-1] == embedded.EOS
    assert embedded.EOS not in states[999:-1]


def test_a_sample_without_some_words_is_continued_with_all_words(language):
    every_state = set(range(201))
    for sample, continued in ((_sample(language, 10), True), (_sample(language, 400_000), False)):
        blocks = list(embedded.with_every_word(iter([sample]), language))
        assert (len(blocks) == 2) == continued
        assert set(itertools.chain(*blocks)) == every_state
        assert blocks[-1][-1] == embedded.EOS


def test_likelihood_conditions_each_token_on_the_previous_token(language):
    states = [embedded.EOS, *_sample(language, 100)]
    probabilities = _transitions(language)[states[:-1], states[1:]]
    nll = embedded.negative_log_likelihood(language, states)
    assert nll == pytest.approx(-sum(map(math.log, probabilities)))


def test_known_perplexity_equals_the_perplexity_of_the_text_files(corpus, language):
    directory, known = corpus
    states = {name: i for i, name in enumerate(["<eos>", *embedded.word_names(200)])}
    for split, expected in (("valid", known.valid_perplexity), ("test", known.test_perplexity)):
        assert 5 < expected < 10
        tokens = [embedded.EOS, *(states[t] for t in _tokens(directory / f"{split}.txt"))]
        nll = embedded.negative_log_likelihood(language, tokens)
        assert math.exp(nll / (len(tokens) - 1)) == pytest.approx(expected, abs=1e-9)
    assert (round(known.valid_perplexity, 6), round(known.test_perplexity, 6)) == KNOWN


def test_texts_are_plain_lines_and_the_same_on_every_machine(corpus):
    directory, _ = corpus
    for split, size in (("train", 400_000), ("valid", 20_000), ("test", 20_000)):
        text = (directory / f"{split}.txt").read_bytes()
        assert text.endswith(b"\n")
        assert all(line and line == line.strip() for line in text[:-1].split(b"\n"))
        assert size <= len(_tokens(directory / f"{split}.txt")) < size + 500
    assert len(set(_tokens(directory / "train.txt"))) == 201
    assert _checksums(directory) == {
        "train": "2417f5a8b384f63e3e670901510e6d0eca05fc1b7c8284358303f9d04b917703",
        "valid": "92b666b6eadbfe3a55bccdf47cbad6fd7495c6ab5329c1caf57143ae15fc5767",
        "test": "e2cd92a90875475fc2662b988ff4d24d23e81382dd67e235400111b1514f8fc7",
    }


def _checksums(directory):
    return {split: sha256_of(directory / f"{split}.txt") for split in SPLITS}


def _contents(directory):
    return {path: (path.stat().st_ino, path.read_bytes()) for path in directory.iterdir()}


def test_a_second_call_writes_nothing(tmp_path):
    first = embedded.write_corpus(tmp_path / "d", SMALL)
    assert first == embedded.load_known_perplexity(tmp_path / "d", _checksums(tmp_path / "d"))
    before = _contents(tmp_path / "d")
    assert len(before) == 4
    assert embedded.write_corpus(tmp_path / "d", SMALL) == first
    assert _contents(tmp_path / "d") == before


def test_interrupted_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(path, language, sample):
        if path.endswith("test.txt"):
            raise KeyboardInterrupt
        return write(path, language, sample)

    write = embedded._write_text
    monkeypatch.setattr(embedded, "_write_text", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embedded.write_corpus(tmp_path / "d", SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [SMALL, OTHER])
def test_a_directory_of_another_process_is_not_replaced(tmp_path, monkeypatch, options):
    def write_later(directory, own):
        write(directory, own)
        monkeypatch.setattr(embedded, "_write_files", write)
        others.append(embedded.write_corpus(tmp_path / "d", options))

    others, write = [], embedded._write_files
    monkeypatch.setattr(embedded, "_write_files", write_later)
    if options == SMALL:
        assert [embedded.write_corpus(tmp_path / "d", SMALL)] == others
    else:
        with pytest.raises(UserError, match="does not contain the synthetic corpus of"):
            embedded.write_corpus(tmp_path / "d", SMALL)
        assert embedded.write_corpus(tmp_path / "d", OTHER) == others[0]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_memory_does_not_grow_with_the_text(tmp_path):
    """With the states or the text of 1.5 million tokens in memory, 5 MB or more would be needed."""
    code = (
        "import resource, sys\n"
        "from lm.data.embedded import LanguageOptions, write_corpus\n"
        "peaks = []\n"
        "for tokens in (100_000, 1_500_000):\n"
        "    write_corpus(f'{sys.argv[1]}/{tokens}', LanguageOptions(num_tokens=tokens))\n"
        "    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        "print(peaks[1] - peaks[0])"
    )
    assert int(run_code(code, tmp_path).stdout) < 4000  # kilobytes
    assert (tmp_path / "1500000/train.txt").stat().st_size > 5e6


def test_the_perplexity_is_unknown_if_a_text_changed(tmp_path):
    embedded.write_corpus(tmp_path / "d", SMALL)
    with open(tmp_path / "d/valid.txt", "a") as file:
        file.write("ba\n")
    assert embedded.load_known_perplexity(tmp_path / "d", _checksums(tmp_path / "d")) is None
    for content in ("", "[]", "{}", None):
        if content is None:
            (tmp_path / "d/truth.json").unlink()
        else:
            (tmp_path / "d/truth.json").write_text(content)
        assert embedded.load_known_perplexity(tmp_path / "d", _checksums(tmp_path / "d")) is None


@pytest.mark.parametrize("name", ["train.txt", "valid.txt", "test.txt", "truth.json"])
@pytest.mark.parametrize("options", [SMALL, OTHER])
def test_a_changed_text_is_not_overwritten(tmp_path, name, options):
    embedded.write_corpus(tmp_path / "d", SMALL)
    (tmp_path / "d" / name).write_text("my own words\n")
    before = _contents(tmp_path / "d")
    with pytest.raises(UserError, match="exists, but does not contain the synthetic corpus of"):
        embedded.write_corpus(tmp_path / "d", options)
    assert _contents(tmp_path / "d") == before
