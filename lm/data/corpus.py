"""The corpus of a run: its splits as token IDs, and their tokenizer."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lm import logger
from lm.config import Config, RunOptions
from lm.data.advice import (
    check_known,
    warn_about_single_line,
    warn_if_unsorted,
    warn_of_many_words,
    warn_without_spaces,
    warn_without_unknown,
)
from lm.data.cache import EncodedCorpus, load_encoded
from lm.data.embedded import KnownPerplexity, load_known_perplexity
from lm.data.encoding import Encoded, Recipe
from lm.data.location import find_data_path, find_sources
from lm.data.ptb import PTB_SHA256
from lm.data.splits import Source
from lm.errors import RunError, UserError
from lm.record import CorpusRecord, run_of_checkpoint
from lm.tokens.selection import earlier_tokenizer, fixed_tokenizer
from lm.tokens.text import sha256_of_text
from lm.tokens.tokenizers import Tokenizer
from lm.tokens.vocabulary import UNK

_CONFIG = Config()


@dataclass(frozen=True)
class Corpus:
    """The splits of a corpus as token IDs, and their tokenizer."""

    record: CorpusRecord  # kind, path and SHA-256 (of the splits and the vocabulary)
    sha256: Mapping[str, str]  # of the text of each split
    tokenizer: Tokenizer
    # Memory-mapped int32 token IDs [tokens]; None if there is no test split.
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray | None
    encoded: Mapping[str, Encoded]  # for each split
    known_perplexity: KnownPerplexity | None = None  # only for a synthetic corpus


def load_corpus_to_train(
    config: Config, options: RunOptions, verified: Mapping[str, str] | None = None
) -> Corpus:
    """Find and load the corpus of a training run. See `load_corpus` for `verified`."""
    resumed = options.output_dir if options.resume else None
    start = run_of_checkpoint(options.init_from) if options.init_from else None
    run_dirs = [resumed] if resumed else []
    if start and not options.data_path:
        run_dirs.append(start)
    # A job that restarts automatically may find the disk of the corpus mounted later.
    missing_error = RunError if options.resume else UserError
    data_path = find_data_path(config.corpus, run_dirs, options.data_path, missing_error)
    tokenizer = earlier_tokenizer(resumed, config, "--resume")
    if not tokenizer and not options.new_vocabulary:
        tokenizer = earlier_tokenizer(start, config, "--init_from")
        if tokenizer:
            logger.info("--init_from: using the tokenizer of %s", start)
    corpus = load_corpus(data_path, config, options.data_url, tokenizer, verified)
    if config.adaptive_softmax_cutoffs and not corpus.tokenizer.sorts_by_frequency:
        raise UserError(
            "adaptive_softmax_cutoffs needs token IDs that are sorted by frequency, so it needs"
            " --tokenizer words or characters"
        )
    if config.cutoffs:
        warn_if_unsorted(corpus.train, len(corpus.tokenizer), config.cutoffs[0])
    elif not tokenizer and not config.vocabulary:
        warn_of_many_words(len(corpus.tokenizer))
    return corpus


def load_corpus(
    data_path: str,
    config: Config = _CONFIG,
    data_url: str | None = None,
    tokenizer: Tokenizer | None = None,
    verified: Mapping[str, str] | None = None,
) -> Corpus:
    """Load a corpus, and encode it if necessary.

    Args:
      data_path: A text file, which is divided into splits, or a directory of splits or of PTB,
        which is downloaded if the directory contains neither; see data/README.md.
      config: Selects the tokenizer and limits its vocabulary.
      tokenizer: Replaces the tokenizer of the config.
      verified: The SHA-256 of each split, if another process of this host has just computed it and
        verified the token IDs. The files are then not read again.
    """
    kind, directory, sources = find_sources(data_path, config, data_url)
    sha256_by_split = verified or checksums(kind, sources)
    is_inherited = tokenizer is not None
    given = None if is_inherited else config.vocabulary
    tokenizer = tokenizer or fixed_tokenizer(config, kind == "ids")
    recipe = Recipe(sources, sha256_by_split, config, tokenizer, is_verified=bool(verified))
    encoded = load_encoded(recipe, directory)
    for split, facts in encoded.splits.items():
        check_known(sources[split].path, facts, encoded.tokenizer, given)
    _log_sizes(kind, data_path, encoded)
    if tokenizer is None and not warn_without_spaces(encoded):
        warn_without_unknown(encoded)
    if not is_inherited:
        warn_about_single_line(encoded)
    known_perplexity = load_known_perplexity(directory, sha256_by_split)
    is_whole = not any(split.unknown for split in encoded.splits.values())
    return Corpus(
        record=corpus_record(kind, data_path, sha256_by_split, encoded.tokenizer),
        sha256=sha256_by_split,
        tokenizer=encoded.tokenizer,
        train=encoded.ids["train"],
        valid=encoded.ids["valid"],
        test=encoded.ids.get("test"),
        encoded=encoded.splits,
        # Words that became <unk> are easier to predict, so the perplexity is no longer known.
        known_perplexity=known_perplexity if is_whole else None,
    )


def checksums(kind: str, sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the SHA-256 of each split, and warn of splits that are not the published PTB."""
    found = {split: sha256_of_text(source.parts) for split, source in sources.items()}
    for split, source in sources.items() if kind == "ptb" else ():
        if found[split] != PTB_SHA256[os.path.basename(source.path)]:
            logger.warning(
                f"{source.path} is not the published PTB; its perplexity cannot be compared with"
                " published ones"
            )
    return found


def corpus_record(
    kind: str, data_path: str, sha256_by_split: Mapping[str, str], tokenizer: Tokenizer
) -> CorpusRecord:
    """Return the identity of a corpus."""
    texts = list(sha256_by_split.values())
    return CorpusRecord(
        kind,
        os.path.abspath(data_path),
        sha256=_digest([*texts, tokenizer.sha256]),
        text_sha256=_digest(texts),
    )


def _digest(checksums: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(checksums).encode()).hexdigest()


def _log_sizes(kind: str, data_path: str, encoded: EncodedCorpus) -> None:
    tokenizer = encoded.tokenizer
    sizes = ", ".join(f"{split} {len(ids):,}" for split, ids in encoded.ids.items())
    logger.info(f"{kind} corpus in {data_path}: vocabulary of {len(tokenizer):,}, tokens {sizes}")
    for split, facts in encoded.splits.items():
        if facts.unknown:
            logger.info(f"{split}: {facts.unknown:,} unknown words became {UNK}")
