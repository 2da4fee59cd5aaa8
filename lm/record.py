"""The record of a run, which identifies its settings, corpus, vocabulary and config file.

`run.json` stores the record of the last job of a run, and the manifest of each checkpoint contains
a copy. `first_difference` compares two records when a run is resumed, used or reported.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Container, Mapping
from typing import Any

from lm.config import Config, RunOptions
from lm.errors import UserError
from lm.json_files import CorruptFile, from_json, read_object, typed_fields, write_json
from lm.options import defaults
from lm.schedule import SCHEDULES

# The files and directories of a run.
RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "log.txt"
OBSERVER_FILE = "observer.txt"  # the output of the command of --on_event
TENSORBOARD_DIR = "tensorboard"
CHECKPOINTS_DIR = "checkpoints"
LOCK_FILE = ".lock"  # held by the job that writes to the directory

# On each occasion, settings may differ if they only affect one of these; see `lm.options.option`.
_MAY_DIFFER = {
    "resume": {"length", "evaluation", "nothing"},
    "compare": {"length", "nothing"},
    "search": {"weights", "length"},
    "resume a search": {"nothing"},
}


@dataclasses.dataclass(frozen=True)
class CorpusRecord:
    """The corpus of a run. Only `sha256` identifies the corpus."""

    kind: str  # "text", "ids", "ptb" or "embedded"
    path: str  # absolute path of --data_path on rank 0
    sha256: str  # hash of the splits and the vocabulary
    text_sha256: str | None = None  # hash of the splits; None if an older version wrote the record


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """The config file of a run. Only the checksums identify the files."""

    path: str
    sha256: str
    loaded: Mapping[str, str] = dataclasses.field(default_factory=dict)  # SHA-256 by name


@dataclasses.dataclass(frozen=True)
class InitRecord:
    """The checkpoint that initialized the weights of a run."""

    path: str  # directory of a checkpoint, or prefix of a checkpoint of a TF 1.x program
    sha256: Mapping[str, str]  # for each file
    # A TF 1.x program's checkpoint, its files, and the --init_rename that maps its names. A run
    # inherits them from the run that it was initialized from.
    tf1_checkpoint: str | None = None
    tf1_sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rename: str = ""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The identity of a run."""

    config: Mapping[str, Any]  # dataclasses.asdict(Config)
    vocabulary: str  # SHA-256 of the tokenizer
    corpus: CorpusRecord
    config_file: FileRecord | None = None  # None unless the file defines a network or fields
    init_from: InitRecord | None = None  # None if the weights were initialized randomly
    # The last job of the run (lm/distributed/provenance.py). Not part of the run's identity.
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def upgraded(self, config_class: type[Config] = Config) -> RunRecord:
        """Add the fields that the class has gained since the run. They had their defaults."""
        return dataclasses.replace(self, config={**defaults(config_class), **self.config})

    @property
    def settings(self) -> dict[str, Any]:
        """The config without the paths of files that `vocabulary` identifies: they may move."""
        paths = {
            name: "a file"
            for name in ("tokenizer", "vocabulary")
            if os.path.isabs(self.config.get(name) or "")
        }
        return {**self.config, **paths}

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that identify the run, except files. The keys are their names."""
        return {
            **self.settings,
            "vocabulary": self.vocabulary,
            "corpus": self.corpus.sha256,
        }

    @property
    def files(self) -> dict[str, str | None]:
        """The SHA-256 of "the config file", and of each file that it loads, by path."""
        file = self.config_file
        return {"the config file": file and file.sha256, **(file.loaded if file else {})}

    def write(self, run_dir: str, has_checkpoints: bool) -> None:
        """Write run.json atomically. A run that has had a checkpoint never starts over."""
        content = {"has_checkpoints": has_checkpoints, **dataclasses.asdict(self)}
        write_json(os.path.join(run_dir, RUN_FILE), content)


def may_differ(
    occasion: str,
    *classes: type,
    config: Mapping[str, Any] | None = None,
    follows_validation: bool = False,
) -> set[str]:
    """Return the names of the settings of some classes that may differ on an occasion.

    Args:
      occasion: "resume" a run, "compare" it with another run, "search" for the best value, or
        "resume a search".
      config: The fields of the run's `Config`. The length affects the weights if the learning rate
        depends on the length.
      follows_validation: Whether the training depends on the perplexities of the evaluation.
    """
    kinds = _MAY_DIFFER[occasion]
    if config:
        schedule = SCHEDULES.get(config["lr_schedule"])  # None if a newer version has defined it
        if not schedule or schedule.has_horizon:
            kinds = kinds - {"length"}
    if follows_validation:
        kinds = kinds - {"evaluation"}
    return {
        field.name
        for cls in classes
        for field in dataclasses.fields(cls)
        if (field.metadata["affects"] or cls.affects_by_default) in kinds
    }


def first_difference(
    first: RunRecord,
    second: RunRecord,
    ignored: Container[str] = (),
    files_may_differ: bool = False,
) -> str | None:
    """Return the name of the first fact or file that differs, except ignored facts.

    The value of a missing fact is None.

    A file that only one of the runs has recorded is ignored: a process that had already imported a
    module does not record it.
    """
    facts, others = first.facts, second.facts
    for name in {**facts, **others}:
        if name not in ignored and facts.get(name) != others.get(name):
            return name
    files, others = first.files, second.files
    for name in () if files_may_differ else files:
        if name in others and files[name] != others[name]:
            return name
    return None


def load_record(run_dir: str) -> RunRecord | None:
    """Read the record of a run; return None if the directory does not contain run.json."""
    path = os.path.join(run_dir, RUN_FILE)
    try:
        content = read_object(path)
        if content is None:
            return None
        content.pop("has_checkpoints", None)
        record = from_json(RunRecord, content, path).upgraded()
        # The config file may define further fields.
        known = {name: record.config[name] for name in defaults(Config)}
        config = {**record.config, **typed_fields(Config, known, path)}
        return dataclasses.replace(record, config=config)
    except CorruptFile as error:  # Each checkpoint contains a copy, which --resume checks.
        fix = "restore it, or remove it and resume with --config and --data_path"
        raise CorruptFile(f"{error}; {fix}") from error


def load_existing_record(run_dir: str) -> RunRecord:
    """Read the record of a run. If there is no run, raise UserError."""
    record = load_record(run_dir)
    if record is None:
        raise UserError(f"{run_dir} is not a run: it has no {RUN_FILE}")
    return record


def missing_config_file(run_dir: str, record: RunRecord) -> UserError:
    """Return the error for a run whose config file is not given."""
    return UserError(
        f"{run_dir} was trained with the network or fields of a config file: add --config"
        f" {record.config_file.path}"
    )


def recorded_config(run_dir: str) -> dict[str, Any] | None:
    """Return the fields of the config of a run, or None if there is no run."""
    record = load_record(run_dir)
    if record and record.config_file:  # Executing a recorded path would not be safe.
        raise missing_config_file(run_dir, record)
    path = os.path.join(run_dir, RUN_FILE)
    return record and dataclasses.asdict(from_json(Config, record.config, path))


def enclosing_run(path: str) -> str | None:
    """Return the run whose checkpoints a path belongs to, also through a link, or None."""
    for place in map(pathlib.Path, (os.path.abspath(path), os.path.realpath(path))):
        for parent in (place, *place.parents):
            if parent.name == CHECKPOINTS_DIR and os.path.exists(parent.parent / RUN_FILE):
                return str(parent.parent)
    return None


def run_of_checkpoint(path: str) -> str | None:
    """Return the path if it is a run, or the run whose checkpoints it belongs to, or None."""
    path = os.path.abspath(path)
    return path if os.path.exists(os.path.join(path, RUN_FILE)) else enclosing_run(path)


def run_with(checkpoint: str) -> str:
    """Return the run of a checkpoint. If it was copied without its run, raise UserError."""
    if run_dir := run_of_checkpoint(checkpoint):
        return run_dir
    raise UserError(f"{checkpoint} is not inside a run: pass RUN/checkpoints/step-N")


def has_checkpoints(run_dir: str) -> bool:
    """Return whether the run has had a checkpoint, according to run.json; see `load_record`."""
    content = read_object(os.path.join(run_dir, RUN_FILE)) or {}
    return bool(content.get("has_checkpoints"))


def settings_that_follow_validation(config: Mapping[str, Any], options: RunOptions) -> list[str]:
    """Return the settings of a run whose effect depends on the validation perplexities.

    `config` contains the fields of the run's `Config`.
    """
    schedule = config["lr_schedule"]
    settings = {
        f"lr_schedule {schedule}": SCHEDULES[schedule].follows_validation,
        "asgd_trigger_epochs": config["asgd_trigger_epochs"],
        "early_stopping_epochs": options.early_stopping_epochs,
        "test_on best": options.test_on == "best",
    }
    return [name for name, is_set in settings.items() if is_set]
