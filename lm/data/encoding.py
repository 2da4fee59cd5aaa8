"""Convert text files to files of token IDs.

Each text is read as a stream, so that memory contains only the distinct words and one block of
text. The first pass numbers the words in the order of their first occurrence, and writes these
provisional IDs. The second pass replaces the provisional IDs by the IDs of the vocabulary.
"""

import collections
import dataclasses
import errno
import itertools
import os
from collections.abc import Iterable, Mapping

import numpy as np

from lm import logger
from lm.config import Config
from lm.data.arrays import read_id_files
from lm.data.splits import Source
from lm.errors import RunError, UserError
from lm.perplexity import TextSize
from lm.tokens.symbols import BUILT
from lm.tokens.text import measured, read_blocks, sha256_of_text
from lm.tokens.tokenizers import UNKNOWN, Tokenizer, Words
from lm.tokens.vocabulary import UNK, Vocabulary

ID_DTYPE = np.dtype("<i4")  # The files are little-endian on every machine.
_ID_BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that determines the token IDs of a corpus."""

    sources: Mapping[str, Source]  # for each split
    sha256: Mapping[str, str]  # for each split
    config: Config
    tokenizer: Tokenizer | None  # None: the training text determines the vocabulary
    is_verified: bool = False  # whether a process of this host has just verified the token IDs


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The statistics of an encoded split."""

    unknown: int  # number of parts that became `<unk>`; a literal `<unk>` does not count
    size: TextSize | None  # None if the files contain token IDs


def ids_file(split: str) -> str:
    """Return the name of the file with the token IDs of a split."""
    return f"{split}.ids"


def encode_source(
    source: Source, tokenizer: Tokenizer, id_path: str, token_dtype: str = "uint16"
) -> Encoded:
    """Write the token IDs of a split to a file of ID_DTYPE.

    If the vocabulary does not contain `<unk>`, unknown text gets the ID len(tokenizer).
    """
    unk_id = len(tokenizer) if tokenizer.unk_id is None else tokenizer.unk_id
    size = None if source.reads_ids else TextSize()
    num_unknown = 0
    if source.reads_ids:
        blocks = read_id_files(source.parts, token_dtype, len(tokenizer))
    else:
        blocks = tokenizer.read_ids(measured(read_blocks(source.parts, "encoding"), size))
    with open(id_path, "wb") as file:
        for block in blocks:
            ids = block.astype(ID_DTYPE)
            num_unknown += _replace_unknown(ids, unk_id)
            file.write(ids.tobytes())
        if not file.tell():
            raise UserError(f"{source.path} does not contain any tokens")
    return Encoded(num_unknown, size)


def encode_corpus(recipe: Recipe, directory: str) -> tuple[Tokenizer, dict[str, Encoded]]:
    """Write `<split>.ids` for each split, and return the tokenizer.

    If the vocabulary is built from the training text without a limit, `<unk>` is added to it only
    if valid or test contain unknown words. The ID of `<unk>` is then the largest ID, because
    `<unk>` does not occur in the training text.
    """
    config, tokenizer = recipe.config, recipe.tokenizer
    paths = {split: os.path.join(directory, ids_file(split)) for split in recipe.sources}
    pieces, found = _new_ids(), {}
    # The long split comes last, so that invalid bytes in the short splits are found within seconds.
    for split, source in reversed(recipe.sources.items()):
        logger.info("encoding %s", source.path)
        if tokenizer:
            found[split] = encode_source(source, tokenizer, paths[split], config.token_dtype)
        else:
            found[split] = _write_pieces(source, BUILT[config.tokenizer], pieces, paths[split])
        if sha256_of_text(source.parts) != recipe.sha256[split]:
            raise RunError(f"{source.path} changed while it was being read; start again")
    if tokenizer:
        return tokenizer, found
    kind = BUILT[config.tokenizer]
    entries = [kind.entry(piece) for piece in pieces]
    counts = collections.Counter()
    for word, count in zip(entries, _count_ids(paths["train"], len(entries))):
        counts[word] += count
    vocabulary = Vocabulary.from_counts(+counts, config)  # + removes words that train lacks
    for split, path in paths.items():
        num_unknown = _replace_ids(path, entries, vocabulary)
        found[split] = dataclasses.replace(found[split], unknown=num_unknown)
    if any(split.unknown for split in found.values()) and vocabulary.unk_id is None:
        vocabulary = Vocabulary((*vocabulary.words, UNK))
    return kind(vocabulary), found


def _new_ids() -> dict[str, int]:
    """Return an empty dictionary that gives each new piece the next ID."""
    return collections.defaultdict(itertools.count().__next__)


def _write_pieces(
    source: Source, kind: type[Words], ids: Mapping[str, int], id_path: str
) -> Encoded:
    """Write the provisional IDs of the pieces of a text."""
    size = TextSize()
    with open(id_path, "wb") as file:
        for pieces in kind.read_pieces(measured(read_blocks(source.parts, "encoding"), size)):
            file.write(np.fromiter(map(ids.__getitem__, pieces), ID_DTYPE, len(pieces)).tobytes())
    return Encoded(0, size)


def _count_ids(id_path: str, num_ids: int) -> list[int]:
    counts = np.zeros(num_ids, np.int64)
    size = max(_ID_BLOCK_BYTES, counts.nbytes)  # adding up counts must not take most of the time
    with open(id_path, "rb") as file:
        while block := file.read(size):
            counts += np.bincount(np.frombuffer(block, ID_DTYPE), minlength=num_ids)
    return counts.tolist()


def _replace_ids(id_path: str, words: Iterable[str], vocabulary: Vocabulary) -> int:
    """Replace provisional IDs by IDs of the vocabulary, and count the unknown words.

    Args:
      words: The word of each provisional ID.
    """
    new_ids = np.array([vocabulary.ids.get(word, UNKNOWN) for word in words], ID_DTYPE)
    unk_id = len(vocabulary) if vocabulary.unk_id is None else vocabulary.unk_id
    num_unknown = 0
    with open(id_path, "r+b") as file:
        while block := file.read(_ID_BLOCK_BYTES):
            ids = new_ids[np.frombuffer(block, ID_DTYPE)]
            num_unknown += _replace_unknown(ids, unk_id)
            file.seek(-len(block), os.SEEK_CUR)
            file.write(ids.tobytes())
    return num_unknown


def _replace_unknown(ids: np.ndarray, unk_id: int) -> int:
    """Replace UNKNOWN in an array, and return its number of occurrences."""
    is_unknown = ids == UNKNOWN
    ids[is_unknown] = unk_id
    return int(np.count_nonzero(is_unknown))


def map_ids(path: str) -> np.ndarray:
    """Map a file of token IDs into memory, [tokens]."""
    try:
        return np.memmap(path, ID_DTYPE, mode="r")
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise UserError(
            f"cannot map {path} into memory: raise the limit on the address space (ulimit -v, or"
            " h_vmem of a scheduler) by at least the size of this file"
        ) from error
