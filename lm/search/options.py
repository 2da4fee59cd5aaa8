"""The options of a search, and `search.json`, which stores its settings."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from lm.config import Config, RunOptions
from lm.errors import UserError
from lm.files import write_json
from lm.options import Checked, may_change, option, replaced
from lm.record import from_json

# The files and directories of a search.
SEARCH_FILE = "search.json"
CONFIG_COPY = "config.py"  # a copy of the config file that the search started with
STUDY_FILE = "study.db"  # the trials, in SQLite
BEST_FILE = "best.py"  # the config of the best trial
TRIALS_DIR = "trials"
CONSOLE_FILE = "console.txt"  # the console output of a trial, in the directory of its run

_RESUME = ["resume"]  # these options do not influence the values of a trial


@dataclasses.dataclass(frozen=True)
class SearchOptions(Checked):
    """The values to try, and the hosts that run the trials."""

    space: str | None = option(
        None,
        "values to try: 'learning_rate=0.3:3:log, keep_prob=0.5:1.0, hidden_size=100|200|300'"
        " (default: suggest(trial, config) in the config file)",
    )
    trials: int = option(
        20, "number of trials, including pruned and failed trials", low=1, may_change=_RESUME
    )
    sampler: str = option(
        "tpe", "method that chooses the values; grid tries combinations of choices in their order",
        choices=("tpe", "cmaes", "nsgaii", "random", "grid"),
    )  # fmt: skip
    pruner: str = option(
        "median",
        "rule to stop trials early: median (worse than the median trial at the same epoch),"
        " hyperband (loses a round) or none",
        choices=("median", "hyperband", "none"),
    )
    search_seed: int = option(1, "seed of the sampler", low=0, high=2**31)
    ranks_per_trial: int = option(1, "ranks of each trial", low=1, may_change=_RESUME)
    parallel_trials: int | None = option(
        None, "trials at a time (default: 1, or with --hosts as many as fit)", low=1,
        may_change=_RESUME,
    )  # fmt: skip
    hosts: str | None = option(
        None, "host1:2,host2:2: hosts and the number of ranks on each (default: this host)",
        may_change=_RESUME,
    )  # fmt: skip
    storage: str | None = option(
        None,
        "postgresql://USER@HOST/DATABASE: a database that several drivers share (default: a SQLite"
        " file in --output_dir, for one driver)", may_change=_RESUME,
    )  # fmt: skip


class Settings(NamedTuple):
    """The settings of a search, as stored in search.json."""

    study: str  # name of the study in the storage
    config: Mapping[str, Any]  # the common config of all trials
    options: SearchOptions
    run: Mapping[str, Any]  # RunOptions of the trials
    corpus: str | None = None  # SHA-256; None before the search has started

    def save(self, directory: str) -> None:
        """Write search.json."""
        content = {**self._asdict(), "options": dataclasses.asdict(self.options)}
        write_json(os.path.join(directory, SEARCH_FILE), content)

    def changed(self, common: Config, config: Mapping, options: Mapping, run: Mapping) -> Settings:
        """Return the settings of a resumed search, after a check of the flags of each class.

        The common config of all trials has the values of `self.config`.
        """
        changeable = may_change(SearchOptions, "resume") | may_change(RunOptions, "resume")
        given = (common, config), (self.options, options), (RunOptions(**self.run), run)
        for old, flags in given:
            new = replaced(old, **flags)
            for name in flags.keys() - changeable:
                before, after = getattr(old, name), getattr(new, name)
                if after != before:
                    raise UserError(
                        f"cannot resume: {name} was {before!r} in this search and is {after!r}"
                        " now. Start a new search to change it"
                    )
        return self._replace(options=replaced(self.options, **options), run={**self.run, **run})


def load_settings(directory: str) -> Settings:
    """Read search.json."""
    path = os.path.join(directory, SEARCH_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            settings = Settings(**json.load(file))
    except OSError as error:
        raise UserError(f"{directory} does not contain a search: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is corrupt: {error!r}") from error
    from_json(RunOptions, settings.run, path)  # rejects fields of a different version
    return settings._replace(options=from_json(SearchOptions, settings.options, path))


def trial_dir(search_dir: str, number: int) -> str:
    """Return the directory of the run of a trial."""
    return os.path.join(search_dir, TRIALS_DIR, f"{number:04d}")
