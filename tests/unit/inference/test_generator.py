"""Text generation: seeds, limits and prompts."""

import itertools

import numpy as np
import pytest

from lm.config import Config
from lm.data.tokenizers import Words, split_words
from lm.data.vocabulary import Vocabulary
from lm.errors import UserError
from lm.inference.generator import Generator, encode_prompt
from lm.inference.sampling import Sampling
from lm.inference.scorer import Scorer
from lm.inference.trained_run import open_run
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


def text(generator, sample=0, num_words=40, seed=1, prompt="", **sampling):
    """Return the generated words without the prompt."""
    how = Sampling(
        num_samples=sample + 1, num_words=num_words, seed=seed, prompt=prompt, **sampling
    )
    *_, pieces = generator.texts(how)
    return split_words("".join(pieces))[len(prompt.split()) :]


def log_probs_after(run, prompt):
    """Return the log-probabilities of the next word after a prompt, computed by scoring."""
    scores = list(Scorer(run, 8).score(" ".join([*prompt, word]) for word in WORDS[1:]))
    (ending,) = Scorer(run, 8).score([" ".join(prompt)])
    return np.array([ending.log_probs[-1], *(score.log_probs[-2] for score in scores)])


def test_seed_and_sample_determine_the_text(generator):
    assert text(generator) == text(generator)
    assert text(generator) != text(generator, seed=2)
    assert text(generator) != text(generator, sample=1)


def test_greedy_words_have_the_best_score(run, generator):
    prompt = ["a", "f"]
    for length in range(5):
        words = text(generator, num_words=length + 1, prompt="a f", top_k=1, allow_unk=True)
        context = [*prompt, *words[:-1]]
        if "<eos>" in context:  # a scored sentence ends here
            break
        assert words[-1] == WORDS[np.argmax(log_probs_after(run, context))]
    assert text(generator, top_k=1, seed=3) == text(generator, temperature=0.0, seed=4)


def test_first_words_follow_the_distribution_of_the_model(run, generator):
    """With 5 degrees of freedom, chi-square exceeds 25.7 once in 10,000 times."""
    draws = 1000
    how = Sampling(prompt="bcd", num_words=1, num_samples=draws, seed=1, allow_unk=True)
    texts = ["".join(pieces) for pieces in generator.texts(how)]
    first = [WORDS.index(*split_words(text)[1:]) for text in texts]
    expected = draws * np.exp(log_probs_after(run, ["bcd"]))
    counts = np.bincount(first, minlength=len(WORDS))
    assert ((counts - expected) ** 2 / expected).sum() < 25.7


def test_unk_is_generated_only_if_allowed(generator):
    assert "<unk>" not in text(generator, num_words=300)
    assert "<unk>" in text(generator, num_words=300, allow_unk=True)


def test_a_text_may_stop_at_the_first_generated_line_end(generator):
    whole = text(generator, num_words=300)
    stopped = text(generator, num_words=300, stop_at_eos=True, prompt="")
    assert stopped == whole[: whole.index("<eos>") + 1]
    (pieces,) = generator.texts(Sampling(prompt="a\nf", seed=1, stop_at_eos=True))
    assert [*itertools.islice(pieces, 3)] == ["a", "\n", "f"]


def test_unknown_words_of_prompts_are_logged(caplog):
    ids = encode_prompt("a zebra\nbcd yak zebra", Words(Vocabulary(WORDS)))
    assert [WORDS[i] for i in ids] == ["a", "<unk>", "<eos>", "bcd", "<unk>", "<unk>"]
    assert caplog.messages == ["not in the vocabulary, read as <unk>: zebra, yak"]
    with pytest.raises(UserError, match="'zebra' is not in the vocabulary"):
        encode_prompt("zebra", WITHOUT_UNK)


def test_sessions_are_closed_after_use_and_after_errors(run, monkeypatch):
    sessions = []

    def fail(loader, session, *_):
        sessions.append(session)
        raise UserError("different shapes")

    for user in Generator(run), Scorer(run):
        user.close()
        sessions.append(user._session)
    monkeypatch.setattr("lm.inference.trained_run.VariableLoader.load_weights", fail)
    with pytest.raises(UserError, match="different shapes"):
        Generator(run)
    for session in sessions:
        with pytest.raises(RuntimeError, match="closed Session"):
            session.run([])
