"""A split or a text file as a run's model reads it: word ids and what to count."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import NamedTuple, Optional

import numpy as np

from lm.data.corpus import find_data_path, load_corpus
from lm.data.encoding import ID_DTYPE, SPLITS, encode_file
from lm.data.vocabulary import EOS, UNK, Vocabulary
from lm.errors import RunError, UserError
from lm.inference.run import Run


class Text(NamedTuple):
    """A text in a run's vocabulary."""

    name: str  # of the split, or the file's path
    ids: np.ndarray  # int32 [tokens], an <eos> after each line
    unknown: int  # words that are not in the vocabulary, which the model reads as <unk>
    characters: int


def load_text(run: Run, split: str, data_path: Optional[str] = None) -> Text:
    """Load a split of the run's corpus, or a text file.

    Args:
      run: The run, whose vocabulary is used.
      split: "train", "valid", "test", or the path of a UTF-8 file, one sentence per line.
      data_path: Directory of the corpus; None for the one that the run remembers.

    Raises:
      UserError: There is no such split or file, it is not text, or it is of another vocabulary
        than the run's, or the corpus has changed since.
      RunError: There is no room for its word ids.
    """
    if split in SPLITS:
        ids, unknown = _split_of_corpus(run, split, data_path)
    elif os.path.exists(split):
        ids, unknown = _encode(split, run.vocabulary)
    else:
        raise UserError(f"--split {split}: neither {', '.join(SPLITS)} nor a file")
    return Text(split, ids, unknown, count_characters(ids, run.vocabulary))


def _split_of_corpus(run: Run, split: str, data_path: Optional[str]) -> tuple[np.ndarray, int]:
    is_given = data_path is not None
    data_path = find_data_path(run.config.corpus, [run.directory], data_path)
    corpus = load_corpus(data_path, run.config.vocab_size, run.config.corpus)
    # The ids of another vocabulary would give a number that looks like a result.
    if corpus.vocabulary.checksum != run.vocabulary.checksum:
        raise UserError(
            f"the corpus in {data_path} is not the one that {run.directory} was trained on: set"
            " --data_path, or name the text file with --split"
        )
    if not is_given and corpus.record.sha256 != run.record.corpus.sha256:
        raise UserError(
            f"the corpus in {data_path} has changed since {run.directory} was trained on it: to"
            f" use it as it is, say so with --data_path {data_path}"
        )
    return getattr(corpus, split), corpus.num_unknown[split]


def _encode(path: str, vocabulary: Vocabulary) -> tuple[np.ndarray, int]:
    directory = tempfile.mkdtemp(prefix="lm-")
    try:
        id_path = os.path.join(directory, "ids")
        unknown = encode_file(path, vocabulary, id_path)
        ids = np.memmap(id_path, ID_DTYPE, mode="r")
    except OSError as error:
        raise RunError(
            f"cannot write the word ids of {path} to {directory}: {error.strerror}; TMPDIR may name"
            " a directory with more room"
        ) from error
    finally:
        # Its mapped content goes when the array does. On NFS both stay until then.
        shutil.rmtree(directory, ignore_errors=True)
    if unknown and vocabulary.unk_id is None:
        raise UserError(
            f"{path} has {unknown:,} words that are not in the run's vocabulary, which has no"
            f" {UNK} to stand for them"
        )
    return ids, unknown


def count_characters(ids: np.ndarray, vocabulary: Vocabulary) -> int:
    """Count the characters of a text as the model reads it.

    Each word counts its characters and one more for the space or line end after it; `<eos>` is
    that line end and adds nothing. An unknown word counts the five characters of `<unk>`.
    """
    lengths = np.array([0 if word == EOS else len(word) + 1 for word in vocabulary.words])
    return int(np.bincount(ids, minlength=len(lengths)) @ lengths)
