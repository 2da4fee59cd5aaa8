"""Find the files of a corpus. If they are missing, create the synthetic corpus or download PTB."""

import os
import re
from collections.abc import Iterable

from lm import logger
from lm.config import Config
from lm.data.embedded import write_corpus
from lm.data.ptb import PTB_SHA256, download_ptb, is_for_ptb, ptb_in
from lm.data.splits import SPLITS, Source, divide_file, find_splits
from lm.errors import ProgramExit, RunError, UserError, error_class, first_names
from lm.record import CorpusRecord, load_record
from lm.tokens.text import sha256_of_text

_DEFAULT_DATA_PATH = "data"
# Names of files that probably contain a text of the user.
_TEXT_NAME = re.compile(
    r"(?!readme|license|requirements).*"
    r"\.(txt|text|tokens|tok|raw|csv|tsv|jsonl|parquet|npy|npz|bin|docx?|odt|rtf|epub"
    r"|gz|tgz|bz2|xz|zst|zip|tar)",
    re.IGNORECASE,
)
_SMALL = 1 << 16  # bytes of a file that is hardly a text, such as a program
_REQUIRED = {"train", "valid"}


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
    names = [entry.name for entry in _visible(data_path) if not entry.name.startswith("ptb.")]
    own = [name for name in names if _TEXT_NAME.fullmatch(name) or name == "train"]
    if corpus == "embedded" and (own or os.path.isfile(data_path)):
        found = first_names(own) or "a text"
        raise UserError(
            f"data_path {data_path} contains {found}, but the run uses the synthetic"
            " corpus; train on your text with --corpus files, or choose a different directory"
        )


def _locate(
    recorded: CorpusRecord, run_dir: str, data_path: str | None, missing_error: type[ProgramExit]
) -> str:
    # The whole project may have been moved, or copied to a different host.
    candidates = [data_path] if data_path else [recorded.path, _DEFAULT_DATA_PATH]
    for directory in candidates:
        files = _recorded_files(directory, recorded.kind)
        for path in files if missing_error is RunError else ():
            if not os.path.exists(path):  # A job that restarts waits for the disk.
                raise RunError(f"{path} is a broken symlink; mount its target")
        if files:
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
        " with --data_path; to evaluate another text, give it to lm.evaluate with --split"
    )


def _recorded_files(data_path: str, kind: str) -> list[str]:
    """Return the files or links of a corpus of this kind, or [] if a split is missing."""
    # Another user's run must not create the corpus in a directory of its choice.
    place = os.path.join(data_path, "embedded") if kind == "embedded" else data_path
    if kind != "ptb" and os.path.isfile(place):
        return [place]
    sources = ptb_in(place) if kind == "ptb" else find_splits(place)
    required = set(SPLITS) if kind == "ptb" else _REQUIRED
    files = [part.path for source in sources.values() for part in source.parts]
    return files if required <= sources.keys() else []


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
    found = [each.name for each in _visible(data_path) if _is_own(each, needs_ptb)]
    has_changed_ptb = any(
        sha256_of_text(source.parts) != PTB_SHA256[os.path.basename(source.path)]
        for source in ptb.values()
    )
    # With an address, PTB is loaded next to other files.
    has_other_files = not data_url and not set(found) <= PTB_SHA256.keys()
    if own or has_changed_ptb or has_other_files:  # PTB must not complete a text of the user.
        found = found or sorted(os.path.basename(source.path) for source in own.values())
        raise UserError(
            f"{data_path} contains {first_names(found)}, but a corpus is either train.txt,"
            " valid.txt and test.txt (other forms: data/README.md), or for PTB"
            f" {', '.join(PTB_SHA256)}; rename or move the files, or choose a file or a directory"
            " with --data_path or an archive of PTB with --data_url"
        )
    state = "does not contain a corpus" if os.path.isdir(data_path) else "does not exist"
    logger.info(
        f"{data_path} {state}: downloading PTB into it; for your own text, give a text file or the"
        " directory of train.txt, valid.txt and test.txt with --data_path"
    )
    download_ptb(data_path, data_url)
    return "ptb", ptb_in(data_path)


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
