"""Texts to evaluate: splits of a run's corpus, or text files."""

from __future__ import annotations

import os
import tempfile
from typing import NamedTuple

import numpy as np

from lm.data.corpus import find_data_path, load_corpus
from lm.data.encoding import ID_DTYPE, SPLITS, encode_file
from lm.data.vocabulary import EOS, UNK, Vocabulary
from lm.errors import RunError, UserError
from lm.inference.run import Run


class Text(NamedTuple):
    """A text in the vocabulary of a run."""

    name: str  # name of the split, or path of the file
    ids: np.ndarray  # int32 [tokens], with an <eos> after each line
    unknown: int  # words that are not in the vocabulary, read as <unk>
    characters: int


def load_text(run: Run, split: str, data_path: str | None = None) -> Text:
    """Load a split of the run's corpus, or a text file.

    Args:
      run: The run.
      split: "train", "valid", "test", or the path of a UTF-8 file with one sentence per line.
      data_path: Directory of the corpus; None for the corpus of the run.

    Raises:
      UserError: If the split or file does not exist or is not text, or if the corpus differs from
        the corpus of the run.
      RunError: If the disk has no space for the token IDs.
    """
    if split in SPLITS:
        ids, unknown = _load_split(run, split, data_path)
    elif os.path.exists(split):
        ids, unknown = _encode(split, run.vocabulary)
    else:
        raise UserError(f"--split {split}: neither {', '.join(SPLITS)} nor a file")
    return Text(split, ids, unknown, count_characters(ids, run.vocabulary))


def _load_split(run: Run, split: str, data_path: str | None) -> tuple[np.ndarray, int]:
    is_given = data_path is not None
    data_path = find_data_path(run.config.corpus, [run.directory], data_path)
    corpus = load_corpus(data_path, run.config.vocab_size, run.config.corpus)
    # With a different vocabulary, the perplexity would be wrong but plausible.
    if corpus.vocabulary.sha256 != run.vocabulary.sha256:
        raise UserError(
            f"the corpus in {data_path} is not the corpus of {run.directory}: set --data_path, or"
            " give the path of the text file with --split"
        )
    if not is_given and corpus.record.sha256 != run.record.corpus.sha256:
        raise UserError(
            f"the corpus in {data_path} has changed since the training of {run.directory}: to use"
            f" it anyway, add --data_path {data_path}"
        )
    return getattr(corpus, split), corpus.num_unknown[split]


def _encode(path: str, vocabulary: Vocabulary) -> tuple[np.ndarray, int]:
    try:
        # The mapping keeps the file's contents after the directory is removed.
        with tempfile.TemporaryDirectory(prefix="lm-", ignore_cleanup_errors=True) as directory:
            id_path = os.path.join(directory, "ids")
            unknown = encode_file(path, vocabulary, id_path)
            ids = np.memmap(id_path, ID_DTYPE, mode="r")
    except OSError as error:
        raise RunError(
            f"cannot write the token IDs of {path} to {tempfile.gettempdir()}: {error.strerror};"
            " set TMPDIR to a directory with more space"
        ) from error
    if unknown and vocabulary.unk_id is None:
        raise UserError(
            f"{path} has {unknown:,} words that are not in the run's vocabulary, which does not"
            f" contain {UNK}"
        )
    return ids, unknown


def count_characters(ids: np.ndarray, vocabulary: Vocabulary) -> int:
    """Count the characters of a text, including a space or line end after each word.

    `<eos>` is the line end of the word before it, so it adds nothing. An unknown word counts as the
    five characters of `<unk>`.
    """
    lengths = np.array([0 if word == EOS else len(word) + 1 for word in vocabulary.words])
    return int(np.bincount(ids, minlength=len(lengths)) @ lengths)
