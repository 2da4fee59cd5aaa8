"""The corpus of a run: found, loaded, and encoded as token IDs."""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from lm import logger
from lm.config import Config, RunOptions
from lm.data.embedded import KnownPerplexity, load_known_perplexity, write_corpus
from lm.data.encoding import Encoded, EncodedCorpus, Recipe, load_encoded
from lm.data.ptb import PTB_SHA256, download_ptb, is_for_ptb, ptb_in
from lm.data.selection import earlier_tokenizer, fixed_tokenizer
from lm.data.splits import SPLITS, Source, divide_file, find_splits
from lm.data.symbols import Bytes
from lm.data.text import sha256_of_text
from lm.data.tokenizers import Tokenizer, Words
from lm.data.vocabulary import UNK
from lm.errors import ProgramExit, RunError, UserError, error_class
from lm.record import CorpusRecord, load_record, run_of_checkpoint

_DEFAULT_DATA_PATH = "data"
_BLOCK = 1 << 18  # token IDs
# Warn if the head covers less than this fraction of the text that the same number of the most
# frequent words would cover.
_LEAST_OF_HEAD = 0.8
_MAX_NAMES = 10  # names that a message lists
# Names of files that probably contain a text of the user.
_TEXT_NAME = re.compile(
    r"(?!readme|license|requirements).*"
    r"\.(txt|text|tokens|tok|raw|csv|tsv|jsonl|parquet|npy|npz|bin|docx?|odt|rtf|epub"
    r"|gz|tgz|bz2|xz|zst|zip|tar)",
    re.IGNORECASE,
)
_SMALL = 1 << 16  # bytes of a file that is hardly a text, such as a program
_MANY_WORDS = 400_000  # WikiText-103 has 268,000
_CLAUSE = re.compile("[\u3040-\u30ff\u3400-\u9fff]{6}")  # Japanese and Chinese characters
_REQUIRED = {"train", "valid"}
_CONFIG = Config()


@dataclass(frozen=True)
class Corpus:
    """The splits of a corpus as token IDs, and their tokenizer."""

    record: CorpusRecord  # kind, path and SHA-256 (of the splits and the vocabulary)
    tokenizer: Tokenizer
    # Memory-mapped int32 token IDs [tokens]; None if there is no test split.
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray | None
    encoded: Mapping[str, Encoded]  # for each split
    sources: Mapping[str, Source]  # for each split
    known_perplexity: KnownPerplexity | None = None  # only for a synthetic corpus


def load_corpus_to_train(config: Config, options: RunOptions) -> Corpus:
    """Find and load the corpus of a training run."""
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
    corpus = load_corpus(data_path, config, options.data_url, tokenizer)
    if config.adaptive_softmax_cutoffs and not corpus.tokenizer.sorts_by_frequency:
        raise UserError(
            "adaptive_softmax_cutoffs needs token IDs that are sorted by frequency, so it needs"
            " --tokenizer words or characters"
        )
    if config.cutoffs:
        _warn_if_unsorted(corpus, config.cutoffs[0])
    elif len(corpus.tokenizer) > _MANY_WORDS and not tokenizer and not config.vocabulary:
        logger.warning(
            f"the vocabulary has {len(corpus.tokenizer):,} words, and the memory and time of a"
            " step grow with this number: consider --vocab_size 50000 or --min_count 3"
        )
    return corpus


def _warn_if_unsorted(corpus: Corpus, num_head: int) -> None:
    """Warn if frequent words are not in the head of an adaptive softmax, as with --vocabulary."""
    counts = np.zeros(len(corpus.tokenizer), np.int64)
    for block in _blocks(corpus.train, max(_BLOCK, len(counts))):
        counts += np.bincount(block, minlength=len(counts))
    head, best = counts[:num_head].sum(), np.sort(counts)[-num_head:].sum()
    if head < _LEAST_OF_HEAD * best:
        logger.warning(
            f"the first {num_head:,} words of the vocabulary cover only"
            f" {head / counts.sum():.0%} of the training text, but the {num_head:,} most frequent"
            f" words would cover {best / counts.sum():.0%}: sort the vocabulary by frequency, or"
            " remove adaptive_softmax_cutoffs"
        )


def _blocks(ids: np.ndarray, size: int = _BLOCK) -> Iterator[np.ndarray]:
    return (ids[first : first + size] for first in range(0, len(ids), size))


def find_data_path(
    corpus: str,
    run_dirs: Iterable[str],
    data_path: str | None = None,
    missing_error: type[ProgramExit] = UserError,
) -> str:
    """Return the given directory of a corpus, the recorded directory, or the default.

    The first record of such a corpus in `run_dirs` is used. If that run was trained on the user's
    own text files, a given directory must contain such files. Otherwise, `missing_error` is raised.
    """
    if data_path:
        _check_data_path(data_path, corpus)
    for run_dir in run_dirs:
        record = load_record(run_dir)
        if record and (record.corpus.kind == "embedded") == (corpus == "embedded"):
            return _locate(record.corpus, run_dir, data_path, missing_error)
    return data_path or _DEFAULT_DATA_PATH


def _check_data_path(data_path: str, corpus: str) -> None:
    """Check that a given path does not contain a text that the run would ignore."""
    names = [entry.name for entry in _visible(data_path) if _TEXT_NAME.fullmatch(entry.name)]
    own = [name for name in names if not name.startswith("ptb.")][:_MAX_NAMES]
    if corpus == "embedded" and own:
        raise UserError(
            f"data_path {data_path} contains {', '.join(own)}, but the run uses the synthetic"
            " corpus; train on your text with --corpus files, or choose a different directory"
        )


def _visible(directory: str) -> list[os.DirEntry]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:  # the directory may not exist yet
        return []
    return [entry for entry in entries if not entry.name.startswith(".")]


def _is_own(entry: os.DirEntry, needs_ptb: bool) -> bool:
    """Return whether an entry of a directory probably is, or contains, a text of the user.

    The names of many texts have no ending. A directory for PTB may have other subdirectories.
    """
    if _TEXT_NAME.fullmatch(entry.name):
        return True
    try:
        if entry.is_dir():
            return not needs_ptb and entry.name != "embedded"
        return entry.stat().st_size >= _SMALL
    except OSError:  # a link to a text whose disk is not mounted
        return True


def _locate(
    recorded: CorpusRecord, run_dir: str, data_path: str | None, missing_error: type[ProgramExit]
) -> str:
    # The whole project may have been moved, or copied to a different host.
    candidates = [data_path] if data_path else [recorded.path, _DEFAULT_DATA_PATH]
    for directory in candidates:
        if _exists(directory, recorded.kind):
            return directory
    # In a new container, a job can create the embedded corpus and download PTB again. PTB is
    # downloaded only into a given or the default directory, because the download takes minutes. If
    # the disk of a text is not mounted, PTB must not be downloaded instead.
    is_default = recorded.path == os.path.abspath(_DEFAULT_DATA_PATH)
    is_place = os.path.isdir(data_path) or is_for_ptb(data_path) if data_path else is_default
    if recorded.kind == "embedded" or (recorded.kind == "ptb" and is_place):
        return candidates[-1]
    raise missing_error(
        f"the corpus of {run_dir} is not in {candidates[0]}; mount its disk, or give its directory"
        " with --data_path (lm.evaluate reads other texts with --split)"
    )


def _exists(data_path: str, kind: str) -> bool:
    # Another user's run must not create the corpus in a directory of its choice.
    place = os.path.join(data_path, "embedded") if kind == "embedded" else data_path
    if kind == "ptb":
        return len(ptb_in(place)) == len(SPLITS)
    return os.path.isfile(place) or _REQUIRED <= find_splits(place).keys()


def load_corpus(
    data_path: str,
    config: Config = _CONFIG,
    data_url: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Load a corpus, and encode it if necessary.

    Args:
      data_path: A text file, which is divided into splits, or a directory of splits or of PTB,
        which is downloaded if the directory contains neither; see data/README.md.
      config: Selects the tokenizer and limits its vocabulary.
      tokenizer: Replaces the tokenizer of the config.
    """
    kind, directory, sources = find_sources(data_path, config, data_url)
    sha256_by_split = {split: sha256_of_text(source.parts) for split, source in sources.items()}
    for split, source in sources.items() if kind == "ptb" else ():
        if sha256_by_split[split] != PTB_SHA256[os.path.basename(source.path)]:
            logger.warning(
                f"{source.path} is not the published PTB; its perplexity cannot be compared with"
                " published ones"
            )
    is_inherited = tokenizer is not None
    given = None if is_inherited else config.vocabulary
    tokenizer = tokenizer or fixed_tokenizer(config, kind == "ids")
    recipe = Recipe(sources, sha256_by_split, config, tokenizer)
    encoded = load_encoded(recipe, directory)
    for split, facts in encoded.splits.items():
        check_known(sources[split].path, facts, encoded.tokenizer, given)
    _log_sizes(kind, data_path, encoded)
    if tokenizer is None and not _warn_without_spaces(encoded):
        _warn_without_unknown(encoded)
    if not is_inherited:
        _warn_about_single_line(encoded)
    known_perplexity = load_known_perplexity(directory, sha256_by_split)
    is_whole = not any(split.unknown for split in encoded.splits.values())
    return Corpus(
        record=corpus_record(kind, data_path, sha256_by_split, encoded.tokenizer),
        tokenizer=encoded.tokenizer,
        train=encoded.ids["train"],
        valid=encoded.ids["valid"],
        test=encoded.ids.get("test"),
        encoded=encoded.splits,
        sources=sources,
        # Words that became <unk> are easier to predict, so the perplexity is no longer known.
        known_perplexity=known_perplexity if is_whole else None,
    )


def find_sources(
    data_path: str, config: Config, data_url: str | None = None
) -> tuple[str, str, dict[str, Source]]:
    """Return the kind of a corpus, its directory, and its splits."""
    if config.corpus == "embedded":
        directory = os.path.join(data_path, "embedded")
        _write_embedded(directory)
        return "embedded", directory, find_splits(directory)
    if not os.path.isfile(data_path):
        kind, sources = _find_or_download(data_path, data_url)
        return "ids" if sources["train"].reads_ids else kind, data_path, sources
    sources = divide_file(data_path, config.split)
    if missing := sorted(_REQUIRED - sources.keys()):
        raise UserError(
            f"{data_path} has no lines for {' and '.join(missing)}: check --split, or divide a text"
            " of few lines into train.txt and valid.txt, for example with head -c and tail -c"
        )
    return "text", os.path.dirname(os.path.abspath(data_path)), sources


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


def check_known(name: str, encoded: Encoded, tokenizer: Tokenizer, file: str | None = None) -> None:
    """Raise UserError if the vocabulary of a text lacks parts of the text and `<unk>`.

    `file` is the file of the vocabulary if it is not the vocabulary of a run.
    """
    if not encoded.unknown or tokenizer.unk_id is not None:
        return
    words = f"{name} has {encoded.unknown:,} words that are not in"
    if file:
        raise UserError(f"{words} {file}, which does not contain {UNK}: add {UNK} or these words")
    raise UserError(
        f"{words} the run's vocabulary, which does not contain {UNK}; a model trained with"
        " --min_count 2 or --vocab_size knows it, and --new_vocabulary trains further on other"
        " words"
    )


def _write_embedded(directory: str) -> None:
    try:
        write_corpus(directory)
    except OSError as error:
        raise error_class(error)(
            f"cannot write the embedded corpus to {directory} ({error.strerror}); choose a"
            " different directory with --data_path"
        ) from error


def _find_or_download(data_path: str, data_url: str | None) -> tuple[str, dict[str, Source]]:
    """Return "text" or "ptb" and its splits, after a download if the directory has neither."""
    name = os.path.basename(os.path.abspath(data_path))
    needs_ptb = bool(data_url) or is_for_ptb(data_path)
    if (_TEXT_NAME.fullmatch(name) or not needs_ptb) and not os.path.exists(data_path):
        raise UserError(
            f"{data_path} does not exist: correct --data_path, or create an empty directory for PTB"
        )
    own, ptb = find_splits(data_path), ptb_in(data_path)
    if not own and len(ptb) == len(SPLITS):
        return "ptb", ptb
    if _REQUIRED <= own.keys() and not ptb:
        return "text", own
    found = [each.name for each in _visible(data_path) if _is_own(each, needs_ptb)][:_MAX_NAMES]
    has_changed_ptb = any(
        sha256_of_text(source.parts) != PTB_SHA256[os.path.basename(source.path)]
        for source in ptb.values()
    )
    # With an address, PTB is loaded next to other files.
    has_other_files = not data_url and not set(found) <= PTB_SHA256.keys()
    if own or has_changed_ptb or has_other_files:  # PTB must not complete a text of the user.
        found = found or sorted(os.path.basename(source.path) for source in own.values())
        raise UserError(
            f"{data_path} contains {', '.join(found)}, but a corpus is either train.txt, valid.txt"
            f" and test.txt (other forms: data/README.md), or for PTB {', '.join(PTB_SHA256)};"
            " rename or move the files, or choose a file or a directory with --data_path or an"
            " archive of PTB with --data_url"
        )
    state = "does not contain a corpus" if os.path.isdir(data_path) else "does not exist"
    logger.info(
        f"{data_path} {state}: downloading PTB into it; for your own text, give a text file or the"
        " directory of train.txt, valid.txt and test.txt with --data_path"
    )
    download_ptb(data_path, data_url)
    return "ptb", ptb_in(data_path)


def _log_sizes(kind: str, data_path: str, encoded: EncodedCorpus) -> None:
    tokenizer = encoded.tokenizer
    sizes = ", ".join(f"{split} {len(ids):,}" for split, ids in encoded.ids.items())
    logger.info(f"{kind} corpus in {data_path}: vocabulary of {len(tokenizer):,}, tokens {sizes}")
    for split, facts in encoded.splits.items():
        if facts.unknown:
            logger.info(f"{split}: {facts.unknown:,} unknown words became {UNK}")


def _warn_without_spaces(encoded: EncodedCorpus) -> bool:
    """Warn if words are clauses in Chinese or Japanese, and return whether they are."""
    tokens = encoded.tokenizer.tokens
    num_clauses = sum(_CLAUSE.search(token) is not None for token in tokens)
    has_no_spaces = encoded.tokenizer.name == Words.name and num_clauses > len(tokens) / 3
    if has_no_spaces:
        logger.warning(
            "the text has no spaces between words, so most words of the vocabulary are clauses: use"
            " --tokenizer characters, or divide the text into words"
        )
    return has_no_spaces


def _warn_without_unknown(encoded: EncodedCorpus) -> None:
    unk_id = encoded.tokenizer.unk_id
    if isinstance(encoded.tokenizer, Words) and unk_id is not None:
        if not any((block == unk_id).any() for block in _blocks(encoded.ids["train"])):
            logger.warning(
                f"{UNK} never occurs in train, so the model cannot learn its probability: add"
                " --min_count 2"
            )


def _warn_about_single_line(encoded: EncodedCorpus) -> None:
    tokenizer = encoded.tokenizer
    if isinstance(tokenizer, (Words, Bytes)):  # subwords are not scored up to `eos_id`
        blocks = _blocks(encoded.ids["train"])
        counts = (np.count_nonzero(block == tokenizer.eos_id) for block in blocks)
        # `words` adds a line end to a text without line ends.
        if all(count <= 1 for count in itertools.accumulate(counts)):
            logger.warning(
                "train is a single line, so the model cannot learn the probability of line ends,"
                " which lm.score and --lines include: use lm.evaluate without --lines"
            )
