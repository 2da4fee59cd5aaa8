"""Corpora of token IDs: NumPy files and files of plain integers."""

import io
import pickle

import numpy as np
import pytest

from lm.config import Config
from lm.data.corpus import load_corpus
from lm.errors import UserError

pytestmark = pytest.mark.timeout(60)

IDS = np.arange(300) % 10
CONFIG = Config(vocab_size=10)


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(*arrays, save=np.savez_compressed) -> bytes:
    file = io.BytesIO()
    save(file, *arrays)
    return file.getvalue()


def flipped(content, position) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


def load(directory, name, content, config=CONFIG, valid=None):
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(content)
    (directory / "valid.npy").write_bytes(npy(IDS) if valid is None else valid)
    return load_corpus(str(directory), config)


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", ">u2", "<i4", ">i4", "<u4", "<i8", "<u8"])
def test_each_type_of_integer_gives_the_same_ids(tmp_path, dtype):
    ids = IDS.astype(dtype)
    for name, content in (
        ("a/train.npy", npy(ids)),
        ("b/train.npz", npz(ids[:100], ids[100:])),
        ("c/train.npz", npz(ids, save=np.savez)),
        ("d/train/1.npy", npy(ids)),
    ):
        corpus = load(tmp_path / name[0], name[2:], content)
        assert corpus.train.tolist() == IDS.tolist()
        assert corpus.train.dtype == np.int32
        assert (corpus.record.kind, corpus.test, len(corpus.tokenizer)) == ("ids", None, 10)


def test_a_type_that_does_not_suit_the_integers_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"every second value .* set --token_dtype uint32"):
        load(tmp_path, "train.bin", IDS.astype("<u4").tobytes())
    with pytest.raises(UserError, match=r"train\.bin is a NumPy array: rename it to \.npy"):
        load(tmp_path, "train.bin", npy(IDS))
    large = Config(vocab_size=65_537)
    with pytest.raises(UserError, match="uint16 is too small for a vocabulary of 65,537 IDs"):
        load(tmp_path, "train.bin", IDS.astype("<u2").tobytes(), large)
    load(tmp_path, "train.bin", IDS.astype("<u2").tobytes(), Config(vocab_size=65_536))


@pytest.mark.parametrize("dtype", ["uint8", None, "int32", "uint32", "int64"])
def test_a_bin_file_contains_little_endian_integers(tmp_path, dtype):
    """The default, uint16, is the format of nanoGPT."""
    content = IDS.astype(np.dtype(dtype or "uint16").newbyteorder("<")).tobytes()
    fields = {"token_dtype": dtype} if dtype else {}
    corpus = load(tmp_path, "train.bin", content, Config(vocab_size=10, **fields))
    assert corpus.train.tolist() == IDS.tolist()


def test_a_renamed_file_is_read_again_in_its_format(tmp_path):
    config = Config(vocab_size=256, token_dtype="uint8")
    assert load(tmp_path, "train.bin", npz(IDS), config).train.tolist() == [*npz(IDS)]
    (tmp_path / "train.bin").rename(tmp_path / "train.npz")
    assert load_corpus(str(tmp_path), config).train.tolist() == IDS.tolist()


def test_files_of_a_directory_are_concatenated_by_name(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/a.bin").write_bytes(b"\1\0\2\0")
    (tmp_path / "train/b.npy").write_bytes(npy(np.array([3, 4])))
    assert load(tmp_path, "train/c.npz", npz([5], [6])).train.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_vocabulary_gives_the_ids_their_words(tmp_path):
    path = tmp_path / "vocabulary.txt"
    path.write_text("<eos>\n" + "\n".join("abcdefghi") + "\n")
    corpus = load(tmp_path / "d", "train.npy", npy(IDS), Config(vocabulary=str(path)))
    assert corpus.tokenizer.decode(corpus.train[:4]) == "\na b c"


def test_a_corpus_of_ids_needs_a_vocabulary(tmp_path):
    with pytest.raises(UserError, match="needs --vocab_size N, its --vocabulary or its --tokeniz"):
        load(tmp_path, "train.npy", npy(IDS), Config())
    for text in ({"tokenizer": "characters"}, {"min_count": 2}):
        with pytest.raises(UserError, match="remove --tokenizer and --min_count, or replace --v"):
            load(tmp_path, "train.npy", npy(IDS), Config(vocab_size=10, **text))


class Attack:
    """An object that fails the test when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("unpickled",)


OBJECTS = npy(np.array([1])).replace(b"'<i8'", b"'|O'  ")[:-8] + pickle.dumps(Attack())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.npy", npy(IDS * 1.0), r"array of float64 of shape \(300,\): token IDs must be a"),
        ("train.npy", npy(IDS.reshape(2, -1)), r"array of int64 of shape \(2, 150\)"),
        ("train.npy", OBJECTS, r"array of object of shape \(1,\)"),
        ("train.npz", npz(IDS, IDS * 1.0), "train.npz, arr_1.npy is an array of float64"),
        ("train.npy", b"", "is not a NumPy array"),
        ("train.npy", b"the cat\n" * 9, "is not a NumPy array"),
        ("train.npy", npy(IDS)[:50], "is not a NumPy array"),
        ("train.npy", npy(IDS)[:-1], "train.npy is truncated: copy it again"),
        ("train.npy", npy(IDS[:0]), "does not contain any token IDs"),
        ("train.npz", npz(), "does not contain any token IDs"),
        ("train.npz", b"PK", r"is not an \.npz file: File is not a zip file"),
        ("train.npz", npz(IDS)[:-30], r"is not an \.npz file"),
        ("train.npz", flipped(npz(IDS), 100), r"is not an \.npz file"),
        ("train.npz", flipped(npz(IDS, save=np.savez), 400), r"is not an \.npz file: Bad CRC"),
        ("train.bin", b"\1\0\2", "does not consist of integers of 2 bytes: check --token_dtype"),
        ("train.bin", b"", "train.bin does not contain any token IDs"),
    ],
)
def test_invalid_arrays_are_one_line(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message) as raised:
        load(tmp_path, name, content)
    assert str(tmp_path / name) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "token", "position"),
    [
        ("train.npy", npy(np.array([1, 10])), "10", "1"),
        ("train.npy", npy(np.array([-1])), "-1", "0"),
        ("train.npy", npy(np.array([2**64 - 1], "u8")), str(2**64 - 1), "0"),
        ("train.npz", npz(IDS, IDS + 1), "10", "309"),
        ("train.bin", np.r_[np.zeros(1_200_000), 10].astype("<u2").tobytes(), "10", "1,200,000"),
    ],
)
def test_an_id_outside_the_vocabulary_names_file_and_position(
    tmp_path, name, content, token, position
):
    message = rf"{name}: token ID {token} at position {position} is outside the vocabulary of 10"
    with pytest.raises(UserError, match=message):
        load(tmp_path, name, content)
    with pytest.raises(UserError, match=r"valid\.npy: token ID 10 at position 9 is outside"):
        load(tmp_path / "valid", "train.npy", npy(IDS), valid=npy(IDS + 1))
