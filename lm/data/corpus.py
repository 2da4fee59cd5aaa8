"""The corpus of a data directory: three splits as word ids, and their vocabulary."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lm.data.cache import cache_directories, load_encoded
from lm.data.encoding import SPLITS
from lm.data.ptb import PTB_SHA256, download_ptb
from lm.data.vocabulary import Vocabulary
from lm.errors import UserError, error_class
from lm.files import sha256_of

logger = logging.getLogger("lm")


@dataclass(frozen=True)
class Corpus:
    """Three splits of a text, `<eos>` after each line, and what tells them from other corpora."""

    train: np.ndarray  # int32 word ids, memory-mapped, [tokens]
    valid: np.ndarray
    test: np.ndarray
    vocabulary: Vocabulary
    checksum: str  # SHA-256 over the checksums of the three files and of the vocabulary
    # Per split, the words that became <unk>; a literal <unk> in the text is an ordinary word.
    num_unknown: Mapping[str, int]
    name: str  # "ptb", "text" or "embedded"


def split_file(data_path: str, name: str, split: str) -> str:
    """Tell which file of a data directory holds a split.

    Args:
      data_path: The directory.
      name: "ptb" or "text".
      split: "train", "valid" or "test".
    """
    return os.path.join(data_path, f"{'ptb.' if name == 'ptb' else ''}{split}.txt")


def load_corpus(
    data_path: str, vocab_size: int | None = None, data_url: str | None = None
) -> Corpus:
    """Read the user's own text or PTB from a directory; download PTB where neither is there.

    Args:
      data_path: A directory with train.txt, valid.txt and test.txt, or with
          ptb.{train,valid,test}.txt, or with neither.
      vocab_size: Keep only so many words, the most frequent of train; None keeps all.
      data_url: Where PTB comes from instead of its public addresses: http(s), file:// or the
          path of a .tgz.

    Raises:
      UserError: The directory, a text in it, vocab_size or data_url cannot be used.
      RunError: PTB cannot be downloaded, or the encoded form cannot be written anywhere.
    """
    name = _find_or_download(data_path, data_url)
    files = {split: split_file(data_path, name, split) for split in SPLITS}
    directories = cache_directories(data_path)
    checksums = _checksums(files)
    if name == "ptb":
        _warn_if_unpublished(files, checksums)
    encoded = load_encoded(files, checksums, vocab_size, directories)
    identity = "\n".join([*(checksums[split] for split in SPLITS), encoded.vocabulary.checksum])
    corpus = Corpus(
        vocabulary=encoded.vocabulary,
        num_unknown=encoded.num_unknown,
        name=name,
        checksum=hashlib.sha256(identity.encode()).hexdigest(),
        **encoded.splits,
    )
    _log_sizes(data_path, corpus)
    return corpus


def _find_or_download(data_path: str, data_url: str | None) -> str:
    """Return "text" or "ptb", whose three files are there when this returns."""
    try:
        present = os.listdir(data_path)
    except FileNotFoundError:
        present = []  # the download makes it
    except OSError as error:
        raise error_class(error)(
            f"cannot read the data directory {data_path}: {error.strerror}; choose "
            f"another one with --data_path"
        ) from error
    needed, ptb_needed = (
        [split_file("", name, split) for split in SPLITS] for name in ("text", "ptb")
    )
    own, ptb = ([n for n in names if n in present] for names in (needed, ptb_needed))
    if own and ptb:
        raise UserError(
            f"{data_path} holds both a text of your own ({', '.join(own)}) and PTB "
            f"({', '.join(ptb)}); move one of them elsewhere"
        )
    if own and own != needed:
        raise UserError(
            f"{data_path} holds {', '.join(own)} but not"
            f" {', '.join(n for n in needed if n not in own)};"
            f" a text of your own needs train.txt, valid.txt and test.txt"
        )
    kind = "text" if own else "ptb"
    if kind == "ptb" and ptb != ptb_needed:
        download_ptb(data_path, data_url)
    elif data_url:
        what = "a text of your own" if own else "PTB"
        logger.info("%s is in %s already: --data_url is not used", what, data_path)
    return kind


def _checksums(files: Mapping[str, str]) -> dict[str, str]:
    checksums = {}
    for split, path in files.items():
        try:
            # A named pipe would block forever, and can be read only once.
            if os.path.exists(path) and not os.path.isfile(path):
                raise UserError(f"{path} is not a file")
            checksums[split] = sha256_of(path)
        except OSError as error:
            raise error_class(error)(f"cannot read {path}: {error.strerror}") from error
    return checksums


def _warn_if_unpublished(files: Mapping[str, str], checksums: Mapping[str, str]) -> None:
    published = {s: PTB_SHA256[os.path.basename(path)] for s, path in files.items()}
    other = [files[split] for split in files if checksums[split] != published[split]]
    if other:
        logger.warning(
            "not the published PTB: %s has another checksum; perplexities cannot "
            "be compared with published ones",
            ", ".join(other),
        )


def _log_sizes(data_path: str, corpus: Corpus) -> None:
    sizes = {split: f"{len(getattr(corpus, split)):,}" for split in SPLITS}
    logger.info(
        "%s corpus in %s: vocabulary of %s words; tokens: %s",
        corpus.name,
        data_path,
        f"{len(corpus.vocabulary):,}",
        ", ".join(f"{split} {size}" for split, size in sizes.items()),
    )
    for split, unknown in corpus.num_unknown.items():
        if unknown:
            logger.info(
                "%s: %s of %s tokens are not in the vocabulary and became <unk>",
                split,
                f"{unknown:,}",
                sizes[split],
            )
