"""Search hyperparameters. Each trial is a run of lm.train on one or more ranks.

  python -m lm.search --config config_small --trials 40 --ranks_per_trial 2 --parallel_trials 2 \\
      --space "learning_rate=0.3:3:log, keep_prob=0.5:1.0, hidden_size=100|200|300" \\
      --output_dir searches/a
  python -m lm.search --output_dir searches/a --resume
  python -m lm.report searches/a --html report.html

Flags of lm.train apply to all trials. See docs/search.md.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lm import logger
from lm.cli.parser import Arguments, ConfigChoice, parse
from lm.config import MAX_THREADS, Config, RunOptions
from lm.errors import UserError, without_secrets
from lm.files import sha256_of
from lm.json_files import from_json, read_object
from lm.options import Checked, option
from lm.record import may_differ
from lm.tokens.selection import with_absolute_paths

# The files and directories of a search.
SEARCH_FILE = "search.json"
CONFIG_COPY = "config.py"  # a copy of the config file that the search started with
STUDY_FILE = "study.db"  # the trials, in SQLite
BEST_FILE = "best.py"  # the config of the best trial
TRIALS_DIR = "trials"
CONSOLE_FILE = "console.txt"  # the console output of a trial, in the directory of its run

# The options of `RunOptions` that the search decides for each trial.
_OF_TRIALS = {"output_dir", "resume", "test_on", "eval", "log_path", "mpi_log", "timeline"}


@dataclasses.dataclass(frozen=True)
class SearchDirectory(ConfigChoice):
    """The search to start or to resume."""

    output_dir: str = option("", "directory of the search", required=True, is_path=True)
    resume: bool = option(False, "resume the search in --output_dir, or start it if it is missing")


@dataclasses.dataclass(frozen=True)
class SearchOptions(Checked):
    """The values to try, and the hosts that run the trials."""

    space: str = option(
        "",
        "values to try: 'learning_rate=0.3:3:log, keep_prob=0.5:1.0, hidden_size=100|200|300'",
    )
    trials: int = option(
        20, "trials, including failed trials", low=1, high=100_000, affects="nothing"
    )
    sampler: str = option(
        "tpe", "method that chooses the values; grid tries combinations of choices in their order",
        choices=("tpe", "random", "grid"),
    )  # fmt: skip
    pruner: str = option(
        "median", "rule to stop trials early; median compares with the trials at the same epoch",
        choices=("median", "hyperband", "none"),
    )  # fmt: skip
    search_seed: int = option(1, "seed of the sampler", low=0, high=2**31)
    ranks_per_trial: int = option(
        1, "ranks of each trial", low=1, high=MAX_THREADS, affects="nothing"
    )
    parallel_trials: int | None = option(
        None, "trials at a time (default: 1, or all that fit on --hosts)", low=1,
        high=MAX_THREADS, affects="nothing",
    )  # fmt: skip
    hosts: str | None = option(
        None, "host1:2,host2:2: hosts and their numbers of ranks (default: this host)",
        affects="nothing",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a search, as stored in search.json."""

    corpus: str  # SHA-256; empty before the search has started
    flags: Mapping[str, Any]  # the flags of Config, SearchOptions and RunOptions
    study: str = "search"  # name of the study, which only this search has

    def given(self, cls: type) -> dict[str, Any]:
        return {name: v for name, v in self.flags.items() if name in cls.__dataclass_fields__}

    def without_secrets(self) -> "Settings":
        """Leave out `data_url` and `on_event` if they contain passwords or keys."""
        kept = {
            name: value
            for name, value in self.flags.items()
            if name not in ("data_url", "on_event") or without_secrets(value) == value
        }
        return dataclasses.replace(self, flags=kept)


def load_settings(directory: str) -> Settings | None:
    """Read search.json; return None if the directory does not contain a search."""
    path = os.path.join(directory, SEARCH_FILE)
    content = read_object(path)
    return None if content is None else from_json(Settings, content, path)


def parse_search(argv: Sequence[str]) -> tuple[Arguments, Settings]:
    """Parse a command line, and add the earlier flags of a resumed search."""
    arguments = _parse(argv[1:])
    directory = arguments[SearchDirectory].output_dir
    settings = load_settings(directory)
    if settings is None:
        return arguments, Settings("", _flags(arguments))
    if not arguments[SearchDirectory].resume:
        raise UserError(
            f"output_dir {directory} already contains a search; continue it with --resume, or"
            " choose a different directory"
        )
    copy, earlier = os.path.join(directory, CONFIG_COPY), settings.flags
    # Flags that may be repeated add up, so an earlier value must not precede a given one.
    given = {name for flags in arguments.given.values() for name in flags}
    if "hosts" in earlier and "hosts" not in given:
        # These hosts may belong to a job that has ended.
        logger.warning("the trials run on this host, because --hosts is not given")
    given.add("hosts")
    kept = {name: value for name, value in earlier.items() if name not in given}
    arguments = _parse([f"--config={copy}", *as_flags(kept), *argv[1:]])
    file = arguments.config_file
    if file.sha256 != sha256_of(copy) or not file.loaded.is_copied_to(directory):
        raise UserError(
            f"cannot resume: {file.path} differs from the config file of this search. Omit --config"
            f" to use the copy {copy}"
        )
    flags = _flags(arguments)
    for name in flags.keys() - may_differ("resume a search", SearchOptions, Config, RunOptions):
        if flags[name] != earlier.get(name):
            raise UserError(
                f"cannot resume: {name} was {earlier.get(name)!r} in this search and is"
                f" {flags[name]!r} now. Start a new search to change it"
            )
    return arguments, dataclasses.replace(settings, flags=flags)


def _parse(words: Sequence[str]) -> Arguments:
    classes = SearchDirectory, SearchOptions, Config, RunOptions
    return parse(["lm.search", *words], __doc__, *classes, leave_out=_OF_TRIALS)


def _flags(arguments: Arguments) -> dict[str, Any]:
    given = arguments.given
    flags = {**given[Config], **given[SearchOptions], **given[RunOptions]}
    for name in flags.keys() & {"data_path", "data_url", "init_from"}:
        if ":/" not in flags[name]:  # --resume may run in a different working directory
            flags[name] = os.path.abspath(flags[name])
    config = with_absolute_paths(arguments[Config])
    return {**flags, **{n: getattr(config, n) for n in flags.keys() & {"tokenizer", "vocabulary"}}}


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Return the flags that set fields to values, which may be bools."""
    return [f"--{name}={value}" for name, value in values.items()]


def trial_dir(search_dir: str, number: int) -> str:
    return os.path.join(search_dir, TRIALS_DIR, f"{number:04d}")
