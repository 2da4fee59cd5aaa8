"""Text generation: seeds, limits and prompts."""

import dataclasses
import itertools
import shutil

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers

from lm.api import TrainedRun
from lm.config import Config
from lm.config_file import load_config_file
from lm.errors import RunError, UserError
from lm.inference.generator import Generator
from lm.inference.prompts import contains_at_end, encode_prompt
from lm.inference.sampling import Sampling
from lm.inference.scorer import Scorer
from lm.inference.trained_run import open_run
from lm.tokens.subwords import load_subwords
from lm.tokens.symbols import Bytes
from lm.tokens.tokenizers import Words, split_words
from lm.tokens.vocabulary import Vocabulary
from tests.untrained import write_run

WORDS = ("<eos>", "<unk>", "a", "bcd", "é", "f")
WITHOUT_UNK = Words(Vocabulary(("<eos>", "a")))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("runs") / "run")
    write_run(directory, Config(hidden_size=16, init_scale=0.8), Words(Vocabulary(WORDS)))
    return open_run(directory)


@pytest.fixture(scope="module")
def generator(run):
    return Generator(run)


def text(generator, num_words=40, seed=1, prompt="", **sampling):
    """Return the generated words without the prompt."""
    how = Sampling(num_words=num_words, seed=seed, **sampling)
    (found,) = generator.generate([prompt], how)
    assert "".join(generator.stream(prompt, how)) == found.prompt + found.text
    return split_words(found.text)


@pytest.fixture(scope="module")
def scorer(run):
    return Scorer(run, 8)


def log_probs_after(scorer, prompt):
    """Return the log-probabilities of the next word after a prompt, computed by scoring."""
    scores = list(scorer.score(" ".join([*prompt, word]) for word in WORDS[1:]))
    (ending,) = scorer.score([" ".join(prompt)])
    return np.array([ending.log_probs[-1], *(score.log_probs[-2] for score in scores)])


def test_seed_prompt_and_position_determine_a_text(run, generator):
    prompts, how = ["a", "", "a f", "a", "bcd"], Sampling(num_words=30, num_samples=2, seed=1)
    found = list(Generator(run, 3).generate(prompts, how))
    assert len(set(found)) == 10
    for position, prompt in enumerate(prompts):
        alone = list(generator.generate([prompt], how, position))
        assert [repr(text) for text in alone] == [repr(text) for text in found[2 * position :][:2]]
    assert text(generator) != text(generator, seed=2)


def test_the_log_probability_of_a_text_is_its_score(generator, scorer):
    (found,) = generator.generate(["a f"], Sampling(num_words=9, seed=3, temperature=0.5))
    words = split_words(found.text)
    expected = 0
    for index, word in enumerate(words):
        start = max(i + 1 for i, w in enumerate(["<eos>", *words[:index]]) if w == "<eos>")
        assert start == 1, "choose a seed without line ends"
        expected += log_probs_after(scorer, ["a", "f", *words[:index]])[WORDS.index(word)]
    assert found.log_probability == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def window_run(tmp_path_factory):
    """A run whose network reads the last 3 words again."""
    file = load_config_file("config_transformer")
    config = dataclasses.replace(file.config, hidden_size=8, num_steps=3, init_scale=0.8)
    config = dataclasses.replace(config, num_layers=1, memory=False)
    directory = str(tmp_path_factory.mktemp("runs") / "windows")
    write_run(directory, config, Words(Vocabulary(WORDS)), functions=file.functions)
    return open_run(directory, functions=file.functions)


@pytest.mark.parametrize(
    "name, prompt", [("run", "a f"), ("window_run", "a"), ("window_run", "a f bcd é f")]
)
def test_the_next_tokens_are_the_most_probable_words(request, name, prompt):
    run = request.getfixturevalue(name)
    expected = np.exp(log_probs_after(Scorer(run, 8), prompt.split()))
    (found,) = Generator(run, 2).next_tokens([prompt], 3)
    order = np.argsort(-expected)[:3]
    assert [token for token, _ in found] == [WORDS[i].replace("<eos>", "\n") for i in order]
    np.testing.assert_allclose([p for _, p in found], expected[order], rtol=1e-5)


def test_next_tokens_with_the_same_characters_have_different_names(tmp_path):
    write_run(tmp_path / "run", Config(hidden_size=4), Bytes())
    (found,) = Generator(open_run(tmp_path / "run")).next_tokens(["a"], 256)
    assert len(dict(found)) == 256


def test_beam_search_finds_what_an_exhaustive_search_finds(tmp_path):
    words = ("<eos>", "a", "b", "c", "d")
    write_run(tmp_path / "run", Config(hidden_size=8, init_scale=0.9), Words(Vocabulary(words)))
    opened, length = open_run(tmp_path / "run"), 3
    ended = [p for n in range(length) for p in itertools.product(words[1:], repeat=n)]
    cut = list(itertools.product(words[1:], repeat=length))
    scores = list(Scorer(opened, 8).score(" ".join(["b", *text]) for text in [*ended, *cut]))
    found = {}
    for text, score in zip([*ended, *cut], scores):
        log_probs = score.log_probs[1:] if len(text) < length else score.log_probs[1:-1]
        ending = "\n" if len(text) < length else ""
        lp = ((5 + len(log_probs)) / 6) ** 0.9
        found["".join(f" {word}" for word in text) + ending] = log_probs.sum() / lp
    best = sorted(found, key=found.get, reverse=True)
    how = Sampling(
        beam_size=64, num_samples=10, num_words=length, stop_at_eos=True, length_penalty=0.9
    )
    assert [t.text for t in Generator(opened, 64).generate(["b"], how)] == best[:10]
    greedy = Sampling(beam_size=1, num_words=length, stop_at_eos=True)
    (text,) = Generator(opened).generate(["b"], greedy)
    (drawn,) = Generator(opened).generate(
        ["b"], Sampling(temperature=0, num_words=3, stop_at_eos=True)
    )
    assert text == drawn


def test_first_words_follow_the_distribution_of_the_model(run, scorer):
    """With 5 degrees of freedom, chi-square exceeds 25.7 once in 10,000 times."""
    draws = 1000
    how = Sampling(num_words=1, num_samples=draws, seed=1, allow_unk=True)
    first = [WORDS.index(*split_words(t.text)) for t in Generator(run, 50).generate(["bcd"], how)]
    expected = draws * np.exp(log_probs_after(scorer, ["bcd"]))
    counts = np.bincount(first, minlength=len(WORDS))
    assert ((counts - expected) ** 2 / expected).sum() < 25.7


def test_unk_is_generated_only_if_allowed(generator):
    assert "<unk>" not in text(generator, num_words=300)
    assert "<unk>" in text(generator, num_words=300, allow_unk=True)


def test_a_text_may_stop_at_the_first_generated_line_end(generator):
    whole = text(generator, num_words=300)
    stopped = text(generator, num_words=300, stop_at_eos=True, prompt="")
    assert stopped == whole[: whole.index("<eos>") + 1]
    pieces = generator.stream("a\nf", Sampling(seed=1, stop_at_eos=True))
    assert [*itertools.islice(pieces, 3)] == ["a", "\n", "f"]


def test_a_line_end_may_be_a_part_of_a_token(tmp_path):
    model = tokenizers.models.BPE({"\u010a": 0, "a": 1, ".": 2, ".\u010a": 3}, [(".", "\u010a")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "my.json"))
    write_run(tmp_path / "run", Config(hidden_size=4), load_subwords(str(tmp_path / "my.json")))
    how = Sampling(num_words=50, num_samples=20, seed=1, stop_at_eos=True)
    for found in Generator(open_run(tmp_path / "run"), 20).generate(["a"], how):
        assert found.text.index("\n") == len(found.text) - 1


def test_a_text_ends_before_the_stop_text(generator):
    (whole,) = generator.generate([""], Sampling(num_words=100, seed=1))
    (stopped,) = generator.generate([""], Sampling(num_words=100, seed=1, stop="f a"))
    assert "f a" in whole.text and stopped.text == whole.text.partition("f a")[0]


@hypothesis.given(st.binary(max_size=60), st.text("aé\U0001f600", min_size=1, max_size=3))
def test_a_stop_text_is_found_at_its_last_byte(data, stop):
    tokenizer, ids = Bytes(), [*data, *stop.encode(), *data]
    found = [n for n in range(1, len(ids) + 1) if contains_at_end(tokenizer, ids[:n], stop)]
    expected = [n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n])]
    assert found[0] == expected[0]


@pytest.mark.parametrize("beam_size", [0, 2])
def test_texts_before_an_invalid_prompt_are_generated(tmp_path, beam_size):
    write_run(tmp_path / "run", Config(hidden_size=4), WITHOUT_UNK)
    generator, found = Generator(open_run(tmp_path / "run"), 2), []
    how = Sampling(num_words=3, seed=1, beam_size=beam_size)
    prompts = ["a", "", "a a", "zebra", "a"]
    with pytest.raises(UserError, match=r"^prompt 14 \('zebra'\): 'zebra' is not in the vocab"):
        found.extend(generator.generate(prompts, how, first=10))
    assert found == list(generator.generate(prompts[:3], how, first=10)) and len(found) == 3
    predicted = []
    with pytest.raises(UserError, match=r"^prompt 14 "):
        predicted.extend(generator.next_tokens(prompts, 2, first=10))
    assert predicted == list(generator.next_tokens(prompts[:3], 2)) and len(predicted) == 3


def test_an_invalid_prompt_of_a_python_program_is_reported_before_texts_are_generated(
    tmp_path, monkeypatch
):
    write_run(tmp_path / "run", Config(hidden_size=4), WITHOUT_UNK)
    monkeypatch.setattr(Generator, "continue_all", lambda *_: pytest.fail("generates texts"))
    with pytest.raises(UserError, match=r"^prompt 2 "):
        TrainedRun(open_run(tmp_path / "run")).generate(["a", "zebra"])


def test_only_the_last_token_of_a_prompt_needs_predictions(run, monkeypatch):
    generator, sizes = Generator(run, 2), []
    compute = generator._run

    def count(*arguments):
        log_probs_BV, state_BS = compute(*arguments)
        sizes.append(len(log_probs_BV))
        return log_probs_BV, state_BS

    monkeypatch.setattr(generator, "_run", count)
    list(generator.next_tokens(["a f bcd", "a"], 2))
    assert sizes == [0, 2, 0, 1]
    list(generator.generate(["a f"], Sampling(beam_size=2, num_words=1)))
    assert sizes[4:] == [0, 0, 1]


def test_a_run_that_cannot_be_opened_again_keeps_its_generator(window_run, tmp_path):
    """The network of a config file has a known number of rows."""
    directory = shutil.copytree(window_run.directory, tmp_path / "run")
    run = TrainedRun(open_run(str(directory), functions=window_run.functions))
    texts = run.generate(["a", "f"], num_words=2, seed=1)
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(RunError, match="no longer exists"):
        run.generate(["a"], num_words=2)
    assert run.generate(["a", "f"], num_words=2, seed=1) == texts


def test_unknown_words_of_prompts_are_logged(generator, caplog):
    ids = encode_prompt("a zebra\nbcd yak zebra", Words(Vocabulary(WORDS)))
    assert [WORDS[i] for i in ids] == ["a", "<unk>", "<eos>", "bcd", "<unk>", "<unk>"]
    assert caplog.messages == ["not in the vocabulary, read as <unk>: zebra, yak"]
    list(generator.generate(["yak"], Sampling(num_words=1, num_samples=3)))
    assert caplog.messages[1:] == ["not in the vocabulary, read as <unk>: yak"]
    with pytest.raises(UserError, match="'zebra' is not in the vocabulary"):
        encode_prompt("zebra", WITHOUT_UNK)


def test_sessions_are_closed_after_errors(run, monkeypatch):
    sessions = []

    def fail(loader, session, *_):
        sessions.append(session)
        raise UserError("different shapes")

    monkeypatch.setattr("lm.inference.trained_run.VariableLoader.load_weights", fail)
    with pytest.raises(UserError, match="different shapes"):
        Generator(run)
    with pytest.raises(RuntimeError, match="closed Session"):
        sessions[0].run([])
