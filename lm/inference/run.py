"""What a run left behind, for the programs that use it: config, vocabulary and weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lm.checkpoint import format as checkpoint
from lm.checkpoint import manifest
from lm.checkpoint.records import refuse_unknown_fields
from lm.cli.flags import Flags
from lm.config import Config
from lm.data.vocabulary import Vocabulary
from lm.errors import UserError


class Run(NamedTuple):
    """A finished or still running training, at one of its checkpoints."""

    directory: str
    config: Config
    vocabulary: Vocabulary
    checkpoint: str  # directory of the checkpoint

    def load_weights(self) -> Mapping[str, np.ndarray]:
        """Return the weights by the names of their variables.

        Raises:
          RunError: They cannot be read.
        """
        return checkpoint.load_weights(self.checkpoint)


def define_run_flags(flags: Flags) -> None:
    """Define `--run` and `--checkpoint`."""
    flags.define(str, "run", None, "directory of the run: what --output_dir was in training")
    flags.define(
        str,
        "checkpoint",
        "last",
        "last, best (by validation perplexity), or a checkpoint's directory (default: last)",
    )


def open_run(flags: Flags) -> Run:
    """Open the run that `--run` and `--checkpoint` name.

    Raises:
      UserError: There is no such run or checkpoint, or its files are damaged.
    """
    directory = flags["run"]
    if not directory:
        raise UserError("--run is missing: give the directory of a run (see --help)")
    config = load_run_config(directory)
    vocabulary = Vocabulary.load(os.path.join(directory, "vocabulary.txt"))
    found = checkpoint.find(directory, flags["checkpoint"])
    # The words would be those of other ids, and nothing else would show it.
    if manifest.read(found).vocabulary != vocabulary.checksum:
        raise UserError(f"{found} is a checkpoint of another vocabulary than that of {directory}")
    return Run(directory, config, vocabulary, found)


def load_run_config(directory: str) -> Config:
    """Read a run's config.json; fields that it lacks, being newer, get their defaults.

    Raises:
      UserError: The directory holds no run, or its config cannot be used.
    """
    path = os.path.join(directory, "config.json")
    fields = read_json_object(path, f"{directory} is not a run")
    refuse_unknown_fields(Config, fields, path)
    try:
        return Config(**fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def read_json_object(path: str, otherwise: str) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
      path: The file.
      otherwise: What to say if it cannot be read.

    Raises:
      UserError: It cannot be read or holds something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise UserError(f"{otherwise}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return value
