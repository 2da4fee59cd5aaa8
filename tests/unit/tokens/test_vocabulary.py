"""The order of token IDs, conversion to IDs and back, and the vocabulary file."""

import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.config import Config
from lm.errors import UserError
from lm.tokens.selection import load_vocabulary
from lm.tokens.vocabulary import EOS, UNK, Vocabulary

pytestmark = pytest.mark.timeout(60)

WORDS = st.text(min_size=1, max_size=8).filter(
    lambda w: w.split() == [w] and w not in (EOS, UNK) and w.isprintable()
)
COUNTS = st.dictionaries(WORDS, st.integers(1, 50), max_size=30)


@pytest.mark.parametrize(("in_text", "rank"), [(0, 1), (1, 0)])
def test_unk_is_ranked_with_the_words_that_it_replaces(in_text, rank):
    counts = {"a": 9, "b": 8, "c": 7, "d": 1, EOS: 2, UNK: in_text}
    vocabulary = Vocabulary.from_counts(counts, Config(vocab_size=4))
    words = ["a", "b", EOS]
    words.insert(rank, UNK)  # 8 occurrences, like "b", or 9 occurrences, like "a"; ties by spelling
    assert vocabulary.words == tuple(words)
    assert vocabulary.encode(["c"]) == [vocabulary.unk_id] == [rank]
    assert Vocabulary.from_counts({"a": 1, EOS: 1}, Config(vocab_size=100)).words == (EOS, "a", UNK)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(min_count=3), (UNK, "a", "b", EOS)),  # 12, 9, 3 and 2
        (Config(vocab_size=3, min_count=3), (UNK, "a", EOS)),
        (Config(vocab_size=5, min_count=3), (UNK, "a", "b", EOS)),
        (Config(min_count=100), (UNK, EOS)),
        (Config(), ("a", UNK, "b", EOS, "c", "d")),
    ],
)
def test_rare_words_become_unk(config, words):
    counts = {"a": 9, "b": 3, "c": 2, "d": 2, EOS: 2, UNK: 8}
    assert Vocabulary.from_counts(counts, config).words == words


@given(COUNTS, st.one_of(st.none(), st.integers(3, 20)), st.integers(1, 50))
def test_ids_are_sorted_by_frequency_including_unk(counts, vocab_size, min_count):
    """The bands of an adaptive softmax are ranges of IDs."""
    counts = {**counts, EOS: 5, UNK: 3}
    words = Vocabulary.from_counts(counts, Config(vocab_size=vocab_size, min_count=min_count)).words
    totals = {**counts, UNK: sum(counts.values()) - sum(counts[w] for w in words if w != UNK)}
    assert [totals[word] for word in words] == sorted((totals[w] for w in words), reverse=True)
    assert all(counts[word] >= min_count for word in words if word not in (EOS, UNK))


@given(COUNTS, st.lists(WORDS))
def test_unknown_words_become_unk_and_none_is_dropped(counts, words):
    vocabulary = Vocabulary.from_counts({**counts, EOS: 5}, Config(vocab_size=1000))
    words = [*counts, *words]
    known = [vocabulary.words[i] for i in vocabulary.encode(words)]
    assert known == [word if word in counts else UNK for word in words]


@given(COUNTS)
def test_a_saved_vocabulary_loads_unchanged(tmp_path_factory, counts):
    path = str(tmp_path_factory.mktemp("vocabulary") / "words.txt")
    vocabulary = Vocabulary.from_counts({**counts, EOS: 5}, Config(vocab_size=1000))
    pathlib.Path(path).write_bytes(vocabulary.content)
    loaded = load_vocabulary(path)
    assert loaded == vocabulary
    assert loaded.sha256 == vocabulary.sha256
    assert loaded.sha256 != Vocabulary((*loaded.words[1:], loaded.words[0])).sha256


def test_the_file_of_a_user_may_have_a_mark_and_no_last_line_end(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\n<eos>")
    assert load_vocabulary(str(path), is_saved=False).words == ("a", "<eos>")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a\n<eos>",
        b"a\n\n<eos>\n",
        b"a\na\n<eos>\n",
        b"a b\n<eos>\n",
        b"a\n",
        b"\xff\n<eos>\n",
    ],
)
def test_a_corrupt_file_is_named(tmp_path, content):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"words\.txt"):
        load_vocabulary(str(path))
    path.unlink()
    with pytest.raises(UserError, match=r"words\.txt: No such file"):
        load_vocabulary(str(path))
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"words\.txt: not a regular file"):
        load_vocabulary(str(path))
