"""The corpus of a run: found, loaded, and encoded as token IDs."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lm import logger
from lm.config import Config, RunOptions
from lm.data.advice import advice
from lm.data.embedded import KnownPerplexity, load_known_perplexity, write_corpus
from lm.data.encoding import SPLITS, EncodedCorpus, load_encoded
from lm.data.ptb import PTB_SHA256, download_ptb
from lm.data.text import sha256_of_text
from lm.data.vocabulary import Vocabulary
from lm.errors import ProgramExit, RunError, UserError, error_class
from lm.record import CorpusRecord, load_record

_DEFAULT_DATA_PATH = "data"
_MAX_NAMES = 10  # in a message
# Files that suggest that a directory contains a corpus of the user.
_TEXT_NAME = re.compile(
    r"(?!readme|license|requirements).*"
    r"\.(txt|text|tokens|tok|raw|csv|tsv|jsonl|parquet|npy|npz|bin|gz|tgz|bz2|xz|zst|zip|tar)",
    re.IGNORECASE,
)
_CONFIG = Config()


@dataclass(frozen=True)
class Corpus:
    """The three splits of a corpus, with `<eos>` after each line, and their vocabulary."""

    record: CorpusRecord  # kind, directory and SHA-256 (of the three files and the vocabulary)
    vocabulary: Vocabulary
    train: np.ndarray  # memory-mapped int32 token IDs [tokens]
    valid: np.ndarray
    test: np.ndarray
    # Per split, the words that became <unk>. A literal <unk> in the text is an ordinary word.
    num_unknown: Mapping[str, int]
    files: Mapping[str, str]  # the text of each split
    known_perplexity: KnownPerplexity | None = None  # only for a synthetic corpus


def load_corpus_to_train(config: Config, options: RunOptions) -> Corpus:
    """Find and load the corpus of a training run."""
    run_dirs = [options.output_dir] if options.resume and options.output_dir else []
    if options.init_from and not options.data_path:  # RUN/checkpoints/step-00001000
        run_dirs.append(os.path.dirname(os.path.dirname(os.path.abspath(options.init_from))))
    # A job that restarts automatically may find the disk of the corpus mounted later.
    missing_error = RunError if options.resume else UserError
    data_path = find_data_path(config.corpus, run_dirs, options.data_path, missing_error)
    return load_corpus(data_path, config, options.data_url)


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
    """Check that a given path does not name a file, or a text that the run would ignore."""
    if os.path.isfile(data_path):
        directory = os.path.dirname(data_path) or os.curdir
        raise UserError(f"data_path {data_path} is a file; give its directory {directory}")
    own = [name for name in _texts_in(data_path) if not name.startswith("ptb.")]
    if corpus == "embedded" and own:
        raise UserError(
            f"data_path {data_path} contains {', '.join(own)}, but the run uses the synthetic"
            " corpus; train on your text with --corpus files, or choose a different directory"
        )


def _texts_in(directory: str) -> list[str]:
    """List the first files that look like texts, token IDs or archives."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:  # the directory may not exist yet
        return []
    return [name for name in names if _TEXT_NAME.fullmatch(name)][:_MAX_NAMES]


def _locate(
    recorded: CorpusRecord, run_dir: str, data_path: str | None, missing_error: type[ProgramExit]
) -> str:
    # The whole project may have been moved, or copied to a different host.
    candidates = [data_path] if data_path else [recorded.path, _DEFAULT_DATA_PATH]
    for directory in candidates:
        # A run of somebody else must not create the corpus in a directory of its choice.
        place = os.path.join(directory, "embedded") if recorded.kind == "embedded" else directory
        if all(map(os.path.exists, _split_paths(place, recorded.kind).values())):
            return directory
    # In a new container, a job can create the embedded corpus and download PTB again. PTB is
    # downloaded only into a given or the default directory, because the download takes minutes. If
    # the disk of a text is not mounted, PTB must not be downloaded instead.
    is_default = recorded.path == os.path.abspath(_DEFAULT_DATA_PATH)
    if recorded.kind == "embedded" or (recorded.kind == "ptb" and (data_path or is_default)):
        return candidates[-1]
    raise missing_error(
        f"the corpus of {run_dir} is not in {candidates[0]}; mount its disk, or give its directory"
        " with --data_path"
    )


def _split_paths(directory: str, kind: str) -> dict[str, str]:
    """Return the path of each split. The user's own texts may be compressed."""
    prefix = "ptb." if kind == "ptb" else ""
    paths = {split: os.path.join(directory, f"{prefix}{split}.txt") for split in SPLITS}
    for split, path in paths.items():
        if kind == "text" and os.path.lexists(f"{path}.gz"):
            if os.path.lexists(path):
                raise UserError(f"{path} and {path}.gz both exist; remove one of them")
            paths[split] = f"{path}.gz"
    return paths


def load_corpus(data_path: str, config: Config = _CONFIG, data_url: str | None = None) -> Corpus:
    """Load a corpus, and encode it if necessary.

    The directory contains train.txt, valid.txt and test.txt (or .txt.gz), or PTB, which is
    downloaded if the directory has neither. The config limits the vocabulary.
    """
    if config.corpus == "embedded":
        kind, directory = "embedded", os.path.join(data_path, "embedded")
        _write_embedded(directory)
    else:
        kind, directory = _find_or_download(data_path, data_url), data_path
    files = _split_paths(directory, kind)
    sha256_by_split = {split: sha256_of_text(path) for split, path in files.items()}
    for split, path in files.items() if kind == "ptb" else ():
        if sha256_by_split[split] != PTB_SHA256[os.path.basename(path)]:
            logger.warning(
                f"{path} is not the published PTB; its perplexity cannot be compared with published"
                " ones"
            )
    encoded = load_encoded(files, sha256_by_split, config)
    identity = "\n".join([*sha256_by_split.values(), encoded.vocabulary.sha256])
    sha256 = hashlib.sha256(identity.encode()).hexdigest()
    _log_sizes(kind, directory, encoded)
    known_perplexity = load_known_perplexity(directory, sha256_by_split)
    return Corpus(
        CorpusRecord(kind, os.path.abspath(data_path), sha256),
        encoded.vocabulary,
        **encoded.splits,
        num_unknown=encoded.num_unknown,
        files=files,
        # Words that became <unk> are easier to predict, so the perplexity is no longer known.
        known_perplexity=None if any(encoded.num_unknown.values()) else known_perplexity,
    )


def _write_embedded(directory: str) -> None:
    try:
        write_corpus(directory)
    except OSError as error:
        raise error_class(error)(
            f"cannot write the embedded corpus to {directory} ({error.strerror}); choose a"
            " different directory with --data_path"
        ) from error


def _find_or_download(data_path: str, data_url: str | None) -> str:
    """Return "text" or "ptb", after a download if the directory contains neither."""
    own, ptb = (
        [os.path.basename(p) for p in _split_paths(data_path, kind).values() if os.path.lexists(p)]
        for kind in ("text", "ptb")
    )
    if sorted((len(own), len(ptb))) == [0, len(SPLITS)]:
        return "text" if own else "ptb"
    found = _texts_in(data_path)
    unpublished = [n for n in ptb if sha256_of_text(os.path.join(data_path, n)) != PTB_SHA256[n]]
    # PTB must not complete a text of the user. An address asks for PTB beside other files.
    if own or unpublished or (not data_url and any(name not in ptb for name in found)):
        raise UserError(
            f"{data_path} contains {', '.join(found)}, but a corpus is either train.txt, valid.txt"
            f" and test.txt (also .txt.gz), or for PTB {', '.join(PTB_SHA256)}; rename or move the"
            " files, or choose a directory with --data_path or an archive of PTB with --data_url"
        )
    state = "does not contain a corpus" if os.path.isdir(data_path) else "does not exist"
    logger.info(
        f"{data_path} {state}: downloading PTB into it; for your own text, give the directory of"
        " train.txt, valid.txt and test.txt with --data_path"
    )
    download_ptb(data_path, data_url)
    return "ptb"


def _log_sizes(kind: str, directory: str, encoded: EncodedCorpus) -> None:
    num_words = len(encoded.vocabulary)
    sizes = ", ".join(f"{split} {len(ids):,}" for split, ids in encoded.splits.items())
    logger.info(f"{kind} corpus in {directory}: vocabulary of {num_words:,} words, tokens {sizes}")
    for split, num_unknown in encoded.num_unknown.items():
        if num_unknown:
            logger.info(f"{split}: {num_unknown:,} unknown words became <unk>")
    for sentence in advice(encoded.vocabulary, encoded.splits):
        logger.warning(sentence)
