"""Convert text files to files of token IDs, in a stream.

Memory contains only the vocabulary and one block of text.
"""

from __future__ import annotations

import codecs
import collections
import itertools
import logging
import os
from collections.abc import Iterator, Mapping

import numpy as np

from lm.data.vocabulary import EOS, UNK, Vocabulary
from lm.errors import RunError, UserError, error_class
from lm.files import sha256_of

SPLITS = ("train", "valid", "test")
ID_DTYPE = np.dtype("<i4")  # in files: little-endian on every machine

logger = logging.getLogger("lm")

_BLOCK_BYTES = 1 << 18
_MAX_WORD_BYTES = 1 << 20
_NEWLINE = b"\n"
_SPACES = (_NEWLINE, b" ", b"\t", b"\r")


def read_words(path: str) -> Iterator[list[str]]:
    """Read the words of a text file, with `<eos>` after each line, one block at a time.

    Blocks end between words, not between lines, because some corpora are one line of a gigabyte.

    Raises:
      UserError: If the file is unreadable, not UTF-8, or without any word.
    """
    line, has_words, rest, last = 1, False, b"", b""
    for block in _read_blocks(path):
        if not last:
            block = block.removeprefix(codecs.BOM_UTF8)
        last = block[-1:] or last
        block = rest + block
        # These bytes never occur inside a UTF-8 character, so that no character is split.
        end = max(map(block.rfind, _SPACES)) + 1
        block, rest = block[:end], block[end:]
        if len(rest) > _MAX_WORD_BYTES:
            raise UserError(
                f"{path}, line {line + block.count(_NEWLINE)}: a word has more than"
                f" {_MAX_WORD_BYTES} bytes; is this a text file?"
            )
        text = _decode(block, path, line)
        line += block.count(_NEWLINE)
        has_words = has_words or bool(text.strip())
        yield text.replace("\n", f" {EOS} ").split()
    text = _decode(rest, path, line)
    if not has_words and not text.strip():
        raise UserError(f"{path}, line {line}: the file does not contain any words")
    yield text.split() + ([] if last == _NEWLINE else [EOS])


def _read_blocks(path: str) -> Iterator[bytes]:
    # A generator of its own: an OSError of the caller's output is not an error of this file.
    try:
        with open(path, "rb") as file:
            yield from iter(lambda: file.read(_BLOCK_BYTES), b"")
    except OSError as error:
        raise error_class(error)(f"cannot read {path}: {error.strerror}") from error


def _decode(block: bytes, path: str, line: int) -> str:
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        line += block.count(_NEWLINE, 0, error.start)
        raise UserError(
            f"{path}, line {line}: byte 0x{block[error.start]:02x} is not valid UTF-8; convert the"
            " file to UTF-8"
        ) from error


def encode_file(path: str, vocabulary: Vocabulary, id_path: str) -> int:
    """Write the token IDs of a text file to a file of ID_DTYPE, and count the unknown words.

    If the vocabulary does not contain `<unk>`, unknown words get the first unused ID,
    len(vocabulary).
    """
    id_of = vocabulary.ids.get
    unk_id = len(vocabulary) if vocabulary.unk_id is None else vocabulary.unk_id
    num_unknown = 0
    with open(id_path, "wb") as file:
        for words in read_words(path):
            ids = np.fromiter(map(id_of, words, itertools.repeat(-1)), ID_DTYPE, len(words))
            unknown = ids < 0
            num_unknown += int(np.count_nonzero(unknown))
            ids[unknown] = unk_id
            file.write(ids.tobytes())
    return num_unknown


def encode_corpus(
    files: Mapping[str, str], sha256: Mapping[str, str], vocab_size: int | None, directory: str
) -> tuple[Vocabulary, dict[str, int]]:
    """Build the vocabulary from the training text, and write `<split>.ids` for each split.

    Without a limit, `<unk>` joins the vocabulary only if valid or test contain unknown words. It
    then gets the last ID, because it does not occur in the training text.

    Returns:
      The vocabulary, and for each split the number of words that became `<unk>`.

    Raises:
      RunError: If a text no longer has its expected SHA-256.
    """
    logger.info("building the vocabulary of %s", files["train"])
    counts: collections.Counter[str] = collections.Counter()
    for words in read_words(files["train"]):
        counts.update(words)
    vocabulary = Vocabulary.from_counts(counts, vocab_size)
    del counts
    num_unknown = {}
    # The long split comes last, so that invalid bytes in the short ones are found within seconds.
    for split in reversed(SPLITS):
        logger.info("encoding %s", files[split])
        id_path = os.path.join(directory, f"{split}.ids")
        num_unknown[split] = encode_file(files[split], vocabulary, id_path)
        if sha256_of(files[split]) != sha256[split]:
            raise RunError(f"{files[split]} changed while it was being read; start again")
    if any(num_unknown.values()) and vocabulary.unk_id is None:
        vocabulary = Vocabulary((*vocabulary.words, UNK))
    return vocabulary, num_unknown
