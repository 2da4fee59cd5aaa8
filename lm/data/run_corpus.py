"""The corpus of a run: loaded, and found again from the run's record."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Optional

from lm.config import Config, RunOptions
from lm.data import embedded
from lm.data.corpus import Corpus, load_corpus, split_file
from lm.data.encoding import SPLITS
from lm.errors import ProgramExit, RunError, UserError, error_class
from lm.record import CorpusRecord, load_record

_DEFAULT_DATA_PATH = "data"


def record_of(data_path: str, corpus: Corpus) -> CorpusRecord:
    """Return what a run has to remember of the corpus that it loaded from a directory."""
    return CorpusRecord(corpus.name, os.path.abspath(data_path), corpus.checksum)


def load_corpus_to_train(
    config: Config, options: RunOptions
) -> tuple[str, Corpus, Optional[embedded.Truth]]:
    """Find and load what a run with these options is trained on.

    Args:
      config: Its `corpus` and `vocab_size`.
      options: Its `data_path` and `data_url`, and the runs that it goes on from.

    Returns:
      The directory of the corpora, and what `load_run_corpus` returns.

    Raises:
      UserError, RunError: As `find_data_path` and `load_corpus`.
    """
    # A job that starts itself again may find a disk mounted that is not now.
    gone = RunError if options.resume else UserError
    data_path = options.data_path or find_data_path(config, _earlier_runs(options), gone)
    if options.resume and options.output_dir and config.corpus == "files":
        check_in_sight(options.output_dir, data_path, gone)
    return data_path, *load_run_corpus(config, data_path, options.data_url)


def _earlier_runs(options: RunOptions) -> list[str]:
    directories = []
    if options.resume and options.output_dir:
        directories.append(options.output_dir)
    if options.init_from:  # RUN/checkpoints/step-00001000
        directories.append(os.path.dirname(os.path.dirname(os.path.abspath(options.init_from))))
    return directories


def check_in_sight(run_directory: str, data_path: str, gone: type[ProgramExit] = UserError) -> None:
    """Do not put PTB in the place of a text that cannot be seen.

    Args:
      run_directory: Of the run that was trained on the text.
      data_path: Where it is to be.
      gone: What to raise where it is not.

    Raises:
      `gone`: The text is not there.
      RunError: A file cannot be read, at least now.
    """
    if _is_in(data_path, "text") or _is_in(data_path, "ptb"):  # nothing is downloaded
        return
    record = load_record(run_directory)
    if record and record.corpus.kind == "text":
        raise gone(
            f"the text of {run_directory} is not in {data_path}: mount what it is on, or give its"
            " directory with --data_path"
        )


def find_data_path(
    config: Config, run_directories: Iterable[str], gone: type[ProgramExit] = UserError
) -> str:
    """Tell where a corpus is when no --data_path says so.

    Args:
      config: Whose corpus is looked for.
      run_directories: Runs that may remember it, the first that does counts.
      gone: What to raise where it is not there any more.

    Returns:
      The directory that the run remembers; the default where none does.

    Raises:
      `gone`: The corpus is not there any more.
      UserError: What a run remembers is damaged.
      RunError: A file cannot be read, at least now.
    """
    for directory in run_directories:
        record = load_record(directory)
        # A config of the other kind has another corpus, of which the run knows nothing.
        if record and (record.corpus.kind == "embedded") == (config.corpus == "embedded"):
            return _find(record.corpus, directory, gone)
    return _DEFAULT_DATA_PATH


def _find(record: CorpusRecord, directory: str, gone: type[ProgramExit]) -> str:
    # The default too: a project's directory is moved, or copied to another host, as a whole.
    for data_path in (record.path, _DEFAULT_DATA_PATH):
        if _is_in(data_path, record.kind):
            return data_path
    # What can be had again goes where it went the first time, so that a job in a fresh container
    # resumes. PTB comes by a download of minutes, which only the default directory gets unasked.
    is_default = record.path == os.path.abspath(_DEFAULT_DATA_PATH)
    if record.kind == "embedded" or (record.kind == "ptb" and is_default):
        return _DEFAULT_DATA_PATH
    raise gone(
        f"the corpus of {directory} is not in {record.path} any more: give its directory with"
        " --data_path"
    )


def _is_in(data_path: str, kind: str) -> bool:
    paths = [data_path]
    if kind != "embedded":
        paths = [split_file(data_path, kind, split) for split in SPLITS]
    for path in paths:
        try:
            os.stat(path)
        except OSError as error:
            if error_class(error) is RunError:  # which os.path.isfile would take for a missing file
                raise RunError(f"cannot read {path}: {error.strerror}") from error
            return False
    return True


def load_run_corpus(
    config: Config, data_path: str, data_url: Optional[str] = None
) -> tuple[Corpus, Optional[embedded.Truth]]:
    """Load the corpus that a config names.

    Args:
      config: Its `corpus` and `vocab_size`.
      data_path: Directory of the corpora.
      data_url: Where PTB is downloaded from, if it must be.

    Returns:
      The corpus, and what a perfect model reaches on it, where that is known.

    Raises:
      UserError, RunError: As `load_corpus`.
    """
    if config.corpus == "files":
        return load_corpus(data_path, config.vocab_size, data_url), None
    directory = os.path.join(data_path, "embedded")
    try:
        truth = embedded.write_corpus(directory)
    except OSError as error:
        raise error_class(error)(
            f"cannot write the embedded corpus to {directory}: {error.strerror}; choose another"
            " directory with --data_path"
        ) from error
    corpus = load_corpus(directory, config.vocab_size)
    # Of its own words: with a smaller vocabulary, <unk> stands for several, and less is to be told.
    is_whole = not any(corpus.num_unknown.values())
    return dataclasses.replace(corpus, name="embedded"), truth if is_whole else None
