"""What a run left behind, for the programs that use it: config, vocabulary and weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from lm import run_files
from lm.checkpoint import choice, manifest
from lm.checkpoint.records import refuse_unknown_fields
from lm.checkpoint.run_dir import MAY_CHANGE
from lm.config import Config
from lm.config_file import BUILT_IN, NetworkFunctions, check_belongs, check_unchanged
from lm.data.vocabulary import Vocabulary
from lm.errors import UserError, first_line
from lm.options import defaults


class Run(NamedTuple):
    """A finished or still running training, at one of its checkpoints."""

    directory: str
    config: Config
    vocabulary: Vocabulary
    checkpoint: str  # directory of the checkpoint
    functions: NetworkFunctions = BUILT_IN


def open_run(
    directory: str,
    checkpoint: str = "last",
    functions: NetworkFunctions = BUILT_IN,
    allow_changed_network: bool = False,
) -> Run:
    """Open a run at one of its checkpoints.

    Args:
      directory: What `--output_dir` was in training.
      checkpoint: "last"; "best", by validation perplexity; or a checkpoint's directory.
      functions: The functions of the config file that the run was trained with.
      allow_changed_network: Whether the file may have changed since.

    Raises:
      UserError: There is no such run or checkpoint, its files are damaged, its config file is
        another one, or the checkpoint is of a run with other settings.
      RunError: The checkpoint cannot be read, at least now.
    """
    check_belongs(directory, functions)
    path = os.path.join(directory, run_files.CONFIG)
    fields = _read_fields(path, directory)
    config = _config_of(fields, path, functions)
    vocabulary = Vocabulary.load(os.path.join(directory, run_files.VOCABULARY))
    found = choice.find(directory, checkpoint)
    # The words would be those of other ids, and nothing else would show it.
    saved = manifest.read(found)
    if saved.vocabulary != vocabulary.checksum:
        raise UserError(f"{found} is a checkpoint of another vocabulary than that of {directory}")
    _check_settings(fields, saved.config, found, directory)
    if functions.sha256 and saved.config_file and not allow_changed_network:
        check_unchanged(functions, saved.config_file, found)
    return Run(directory, config, vocabulary, found, functions)


def _check_settings(
    of_run: Mapping[str, Any], of_checkpoint: Mapping[str, Any], checkpoint: str, directory: str
) -> None:
    """Refuse the weights of another run: settings such as forget_bias are in no shape."""
    # A field that the checkpoint does not know is newer: the run was trained without.
    before = {**defaults(Config), **of_checkpoint}
    for name in sorted(of_run.keys() & before.keys() - MAY_CHANGE):
        ours, theirs = of_run[name], before[name]
        if ours != theirs and ours == ours:  # NaN is not equal to itself
            raise UserError(
                f"{checkpoint} was trained with {name} {theirs!r}, and {directory} with {ours!r}:"
                " give --run the run that it is of"
            )


def _read_fields(path: str, directory: str) -> dict[str, Any]:
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
    return fields


def _config_of(fields: Mapping[str, Any], path: str, functions: NetworkFunctions) -> Config:
    """Make a run's config; fields that it lacks, being newer, get their defaults."""
    cls = functions.config_class
    refuse_unknown_fields(cls, fields, path, by_file=functions.sha256 is not None)
    try:
        return cls(**fields)
    except Exception as error:  # also of a check of a config file's own
        raise UserError(f"{path}: {first_line(error)}") from error
