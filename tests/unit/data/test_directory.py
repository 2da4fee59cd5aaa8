"""The choice between the user's text and PTB by the files of a directory."""

import logging
import os
import re

import pytest

import lm.data.location
from lm.data.corpus import load_corpus
from lm.errors import UserError
from tests.unit.data.texts import write


def test_mixed_corpora_are_rejected(tmp_path):
    data_path = write(tmp_path / "d")
    write(data_path, prefix="ptb.")
    with pytest.raises(UserError, match=r"contains ptb\.test\.txt.*, train\.txt.* either train"):
        load_corpus(data_path)
    data_path = write(tmp_path / "z")
    (tmp_path / "z/valid.txt.gz").touch()
    with pytest.raises(UserError, match=r"z/valid\.txt and .*z/valid\.txt\.gz both exist; remove"):
        load_corpus(data_path)


@pytest.mark.parametrize(
    "names",
    [
        ["test.txt", "valid.txt"],
        ["train.txt.gz"],
        ["Test.txt", "Train.txt", "Valid.txt"],
        ["input.txt"],
        ["wiki.test.tokens", "wiki.train.tokens", "wiki.valid.tokens"],
        ["simple-examples.tgz"],
        ["ptb.train.txt", "ptb.valid.txt"],  # these are not the published files
    ],
)
def test_ptb_is_not_mixed_with_a_text_of_the_user(tmp_path, monkeypatch, names):
    monkeypatch.setattr(lm.data.location, "download_ptb", lambda *_: pytest.fail("download"))
    for name in names:
        (tmp_path / name).write_text("a b c\n")
    found = re.escape(", ".join(names))
    expected = (
        r"train\.txt, valid\.txt and test\.txt .* ptb\.train\.txt, ptb\.valid\.txt, ptb\.test"
    )
    with pytest.raises(UserError, match=f"contains {found}, but .* {expected}"):
        load_corpus(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == names


@pytest.mark.parametrize("name", ["my_text.txt", "ids.npy", "corpus.jsonl.gz", "text8"])
def test_ptb_does_not_replace_a_missing_text(tmp_path, monkeypatch, name):
    monkeypatch.setattr(lm.data.location, "download_ptb", lambda *_: pytest.fail("download"))
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}/{name} does not exist: correct --")):
        load_corpus(str(tmp_path / name))
    assert not os.listdir(tmp_path)


def test_ptb_does_not_replace_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(lm.data.location, "download_ptb", lambda *_: pytest.fail("download"))
    (tmp_path / "essay.docx").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"contains essay.docx, but a corpus is either"):
        load_corpus(str(tmp_path))


@pytest.mark.parametrize(
    "create",
    [
        lambda path: path.write_text("a b c " * 20_000),
        lambda path: path.symlink_to("/disk/that/is/not/mounted"),
        lambda path: path.mkdir(),
    ],
    ids=["large file", "link", "directory"],
)
def test_ptb_is_not_downloaded_next_to_a_text_without_ending(tmp_path, monkeypatch, create):
    monkeypatch.setattr(lm.data.location, "download_ptb", lambda *_: pytest.fail("download"))
    (tmp_path / "own").mkdir()
    create(tmp_path / "own/text8")
    with pytest.raises(UserError, match="own contains text8, but a corpus is either"):
        load_corpus(str(tmp_path / "own"))
    assert os.listdir(tmp_path / "own") == ["text8"]


def test_a_download_is_announced(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lm")
    monkeypatch.setattr(
        lm.data.location, "download_ptb", lambda directory, _: write(directory, prefix="ptb.")
    )
    message = "{}: downloading PTB into it; for your own text, give a text file or the directory of"
    (tmp_path / "here").mkdir()
    for name in ("README.md", "requirements.txt", "main.py"):
        (tmp_path / "here" / name).touch()
    load_corpus(str(tmp_path / "here"))
    assert message.format(f"{tmp_path}/here does not contain a corpus") in caplog.text
    load_corpus(str(tmp_path / "my_ptb"))
    assert message.format(f"{tmp_path}/my_ptb does not exist") in caplog.text
    (tmp_path / "data/text8").mkdir(parents=True)  # the default directory has several corpora
    load_corpus(str(tmp_path / "data"))
    assert message.format(f"{tmp_path}/data does not contain a corpus") in caplog.text
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive/a.tgz").touch()
    load_corpus(str(tmp_path / "archive"), data_url=str(tmp_path / "archive/a.tgz"))
    assert (tmp_path / "archive/ptb.train.txt").exists()


def test_unpublished_ptb_files_are_accepted_with_a_warning(tmp_path, caplog):
    assert load_corpus(write(tmp_path / "d", prefix="ptb.")).record.kind == "ptb"
    assert "ptb.train.txt is not the published PTB" in caplog.text
