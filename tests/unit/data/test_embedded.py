"""The embedded corpus: its known perplexity is correct, and its text is the same everywhere."""

from __future__ import annotations

import collections
import json
import math
import multiprocessing

import numpy as np
import pytest

from lm import files
from lm.data import embedded
from lm.data.encoding import SPLITS
from lm.errors import UserError
from lm.files import sha256_of

SMALL = {"num_words": 30, "num_successors": 4, "train_tokens": 3000, "eval_tokens": 500}


def _rng(seed=0):
    return np.random.Generator(np.random.PCG64(seed))


def _tokens(path):
    """Read a text as the corpus loader does, with `<eos>` at the end of each line."""
    return [t for line in path.read_text("utf-8").splitlines() for t in [*line.split(), "<eos>"]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    return directory, embedded.write_corpus(directory)


@pytest.fixture(scope="module")
def transitions():
    return embedded.transition_matrix(seed=1, num_words=200, num_successors=8)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_words", "num_successors"), [(2, 2), (5, 5), (40, 3), (300, 8)])
def test_transitions_form_a_sparse_irreducible_chain(seed, num_words, num_successors):
    chain = embedded.transition_matrix(seed, num_words, num_successors)
    assert chain.shape == (num_words + 1, num_words + 1)
    np.testing.assert_allclose(chain.sum(axis=1), 1.0, rtol=1e-12)
    assert ((chain > 0).sum(axis=1) == num_successors).all()
    assert chain[embedded.EOS, embedded.EOS] == 0  # no empty lines
    reached = np.eye(num_words + 1) + (chain > 0)
    for _ in range(math.ceil(math.log2(num_words + 1))):
        reached = np.minimum(reached @ reached, 1.0)
    assert (reached > 0).all()


def test_bigram_frequencies_approach_the_transitions():
    chain = embedded.transition_matrix(seed=3, num_words=10, num_successors=4)
    states = embedded.sample_states(chain, _rng(), 200_000)
    counts = np.zeros_like(chain)
    np.add.at(counts, ([embedded.EOS, *states[:-1]], states), 1)
    visits = counts.sum(axis=1, keepdims=True)
    # Within six standard deviations of a binomial proportion, and without impossible bigrams.
    assert (np.abs(counts / visits - chain) <= 6 * np.sqrt(chain * (1 - chain) / visits)).all()


def test_sample_ends_with_the_sentence_that_reaches_the_minimum_length(transitions):
    states = embedded.sample_states(transitions, _rng(), 1000)
    assert len(states) >= 1000
    assert states[-1] == embedded.EOS
    assert embedded.EOS not in states[999:-1]


def test_text_perplexity_conditions_the_first_token_on_eos():
    chain = np.array([[0.0, 0.25, 0.75], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    assert embedded.text_perplexity(chain, [1, 1, 0, 2, 0]) == pytest.approx(
        (0.25 * 0.5 * 0.5 * 0.75 * 1.0) ** (-1 / 5)
    )


def test_known_perplexity_equals_the_perplexity_of_the_text_files(corpus, transitions):
    directory, known = corpus
    states = {name: i for i, name in enumerate(["<eos>", *embedded.word_names(200)])}
    for split, expected in (("valid", known.valid_perplexity), ("test", known.test_perplexity)):
        assert 5 < expected < 10
        tokens = [states[token] for token in _tokens(directory / f"{split}.txt")]
        assert embedded.text_perplexity(transitions, tokens) == pytest.approx(expected, abs=1e-9)


def test_a_bigram_model_counted_on_train_reaches_the_known_perplexity(corpus):
    """The training text is sufficient to learn the language."""
    directory, known = corpus
    train = ["<eos>", *_tokens(directory / "train.txt")]
    test = ["<eos>", *_tokens(directory / "test.txt")]
    bigrams, words = collections.Counter(zip(train, train[1:])), collections.Counter(train[:-1])
    assert min(words.values()) >= 100
    nll = -sum(math.log((bigrams[pair] + 0.01) / words[pair[0]]) for pair in zip(test, test[1:]))
    assert math.exp(nll / (len(test) - 1)) == pytest.approx(known.test_perplexity, rel=0.01)


def test_texts_are_plain_lines_and_the_same_on_every_machine(corpus):
    directory, _ = corpus
    for split, size in (("train", 400_000), ("valid", 20_000), ("test", 20_000)):
        text = (directory / f"{split}.txt").read_bytes()
        assert text.endswith(b"\n")
        assert all(line and line == line.strip() for line in text[:-1].split(b"\n"))
        assert size <= len(_tokens(directory / f"{split}.txt")) < size + 500
    assert len(set(_tokens(directory / "train.txt"))) == 201
    assert {split: sha256_of(directory / f"{split}.txt") for split in SPLITS} == {
        "train": "2417f5a8b384f63e3e670901510e6d0eca05fc1b7c8284358303f9d04b917703",
        "valid": "92b666b6eadbfe3a55bccdf47cbad6fd7495c6ab5329c1caf57143ae15fc5767",
        "test": "e2cd92a90875475fc2662b988ff4d24d23e81382dd67e235400111b1514f8fc7",
    }


def _contents(directory):
    return {path: (path.stat().st_ino, path.read_bytes()) for path in directory.iterdir()}


def test_second_call_writes_nothing_and_a_new_seed_replaces_all_files(tmp_path, monkeypatch):
    first = embedded.write_corpus(tmp_path, **SMALL)
    assert embedded.KnownPerplexity(**json.loads((tmp_path / "truth.json").read_text())) == first
    before = _contents(tmp_path)
    assert len(before) == 4
    assert embedded.write_corpus(tmp_path, **SMALL) == first
    # The last bits differ on other CPUs, where the directory may be read-only.
    exact = embedded.text_perplexity
    monkeypatch.setattr(embedded, "text_perplexity", lambda *a: math.nextafter(exact(*a), 9))
    embedded.write_corpus(tmp_path, **SMALL)
    assert _contents(tmp_path) == before
    embedded.write_corpus(tmp_path, seed=2, **SMALL)
    assert set(tmp_path.iterdir()) == set(before)
    assert all(path.read_bytes() != content for path, (_, content) in before.items())


@pytest.mark.parametrize("then_seed", [1, 2])
@pytest.mark.parametrize("num_written", range(4))
def test_interrupted_writing_is_completed(tmp_path, monkeypatch, num_written, then_seed):
    embedded.write_corpus(tmp_path, **SMALL)
    paths, write = sorted(tmp_path.iterdir()), files.write_atomically

    def interrupt(path, content):
        if len(written) == num_written:
            raise KeyboardInterrupt
        written.append(path)
        write(path, content)

    written = []
    monkeypatch.setattr(files, "write_atomically", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embedded.write_corpus(tmp_path, seed=2, **SMALL)
    monkeypatch.setattr(files, "write_atomically", write)
    for seed in (then_seed, 2):
        embedded.write_corpus(tmp_path, seed=seed, **SMALL)
        whole = tmp_path / f"whole-{seed}"
        embedded.write_corpus(whole, seed=seed, **SMALL)
        assert all(path.read_bytes() == (whole / path.name).read_bytes() for path in paths)


def test_a_corpus_of_the_user_is_not_overwritten(tmp_path):
    (tmp_path / "valid.txt").write_text("my own words\n")
    with pytest.raises(UserError, match=r"valid\.txt"):
        embedded.write_corpus(tmp_path, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["valid.txt"]
    assert (tmp_path / "valid.txt").read_text() == "my own words\n"


def _write_and_read(directory, barrier, queue):
    barrier.wait()
    known = embedded.write_corpus(directory, **SMALL)
    # The files must be complete even while other processes write them.
    queue.put((known, *(sha256_of(directory / f"{split}.txt") for split in SPLITS)))


@pytest.mark.timeout(60)
def test_concurrent_writers_agree(tmp_path):
    context = multiprocessing.get_context("spawn")  # this process may have threads
    barrier, queue = context.Barrier(6), context.Queue()
    processes = [
        context.Process(target=_write_and_read, args=(tmp_path / "corpus", barrier, queue))
        for _ in range(6)
    ]
    for process in processes:
        process.start()
    results = {queue.get(timeout=50) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(results) == 1
    names = sorted(path.name for path in (tmp_path / "corpus").iterdir())
    assert names == ["test.txt", "train.txt", "truth.json", "valid.txt"]
