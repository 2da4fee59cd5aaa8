"""What a run left behind, for the programs that use it: config, vocabulary and weights."""

from __future__ import annotations

import json
import os
from typing import NamedTuple, Optional

from lm import run_files
from lm.checkpoint import choice, manifest
from lm.checkpoint.records import refuse_unknown_fields
from lm.config import Config
from lm.config_file import ConfigFile, check_belongs, check_unchanged
from lm.data.vocabulary import Vocabulary
from lm.errors import UserError, first_line


class Run(NamedTuple):
    """A finished or still running training, at one of its checkpoints."""

    directory: str
    config: Config
    vocabulary: Vocabulary
    checkpoint: str  # directory of the checkpoint
    file: Optional[ConfigFile] = None  # that it was trained with, where it is part of the run


def open_run(
    directory: str,
    checkpoint: str = "last",
    file: Optional[ConfigFile] = None,
    allow_changed_network: bool = False,
) -> Run:
    """Open a run at one of its checkpoints.

    Args:
      directory: What `--output_dir` was in training.
      checkpoint: "last"; "best", by validation perplexity; or a checkpoint's directory.
      file: The config file, for a run whose network or fields it has brought.
      allow_changed_network: Whether the file may have changed since.

    Raises:
      UserError: There is no such run or checkpoint, its files are damaged, or its config file is
        another one.
    """
    check_belongs(directory, file)
    config = _load_config(directory, file)
    vocabulary = Vocabulary.load(os.path.join(directory, run_files.VOCABULARY))
    found = choice.find(directory, checkpoint)
    # The words would be those of other ids, and nothing else would show it.
    saved = manifest.read(found)
    if saved.vocabulary != vocabulary.checksum:
        raise UserError(f"{found} is a checkpoint of another vocabulary than that of {directory}")
    if file and saved.config_file and not allow_changed_network:
        check_unchanged(file, saved.config_file, found)
    return Run(directory, config, vocabulary, found, file)


def _load_config(directory: str, file: Optional[ConfigFile]) -> Config:
    """Read a run's config; fields that it lacks, being newer, get their defaults."""
    cls = type(file.config) if file else Config
    path = os.path.join(directory, run_files.CONFIG)
    try:
        with open(path, encoding="utf-8") as text:
            fields = json.load(text)
    except OSError as error:
        reason = f"cannot read {path}: {error.strerror}"
        raise UserError(f"{directory} is not a run: {reason}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} does not hold a JSON object")
    refuse_unknown_fields(cls, fields, path, by_file=file is not None)
    try:
        return cls(**fields)
    except Exception as error:  # also of a check of a config file's own
        raise UserError(f"{path}: {first_line(error)}") from error
