"""How a search is done, and the file that keeps it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from lm import run_files
from lm.config import Config, RunOptions
from lm.errors import UserError
from lm.files import write_json
from lm.options import Checked, may_change, option, replaced
from lm.record import from_json

_RESUME = ["resume"]  # changes no trial, only how many there are, and where


@dataclasses.dataclass(frozen=True)
class SearchOptions(Checked):
    """How a space is searched, and where.

    Raises UserError, naming the field, for a value of the wrong type or out of range.
    """

    space: Optional[str] = option(
        None,
        "what to try: 'learning_rate=0.3:3:log, keep_prob=0.5:1.0, hidden_size=100|200|300';"
        " without it the config file has suggest(trial, config)",
    )
    trials: int = option(
        20, "how many trials, those that are pruned or fail included", low=1, may_change=_RESUME
    )
    sampler: str = option(
        "tpe", "how the next values are chosen; grid tries combinations of choices, in their order",
        choices=("tpe", "cmaes", "nsgaii", "random", "grid"),
    )  # fmt: skip
    pruner: str = option(
        "median",
        "which trials to stop early: those worse than the median of the others at the same epoch,"
        " those that lose a round of hyperband, or none",
        choices=("median", "hyperband", "none"),
    )
    search_seed: int = option(1, "seed of the sampler", low=0, high=2**31)
    ranks_per_trial: int = option(1, "ranks that train one trial", low=1, may_change=_RESUME)
    parallel_trials: Optional[int] = option(
        None, "trials at a time (default: 1; with --hosts as many as fit)", low=1,
        may_change=_RESUME,
    )  # fmt: skip
    hosts: Optional[str] = option(
        None, "host1:2,host2:2: the hosts and how many ranks each takes (default: this host)",
        may_change=_RESUME,
    )  # fmt: skip
    storage: Optional[str] = option(
        None,
        "postgresql://USER@HOST/DATABASE that several drivers share (default: a SQLite file in"
        " --output_dir, for one driver)", may_change=_RESUME,
    )  # fmt: skip
    heartbeat_seconds: int = option(
        60, "with --storage: a driver that is silent for three times as long is dead", low=1,
        may_change=_RESUME,
    )  # fmt: skip


class Settings(NamedTuple):
    """A search: what it tries, and how."""

    study: str  # its name in the storage
    config: Mapping[str, Any]  # fields of the config that all trials have in common
    options: SearchOptions
    run: Mapping[str, Any]  # RunOptions of the trials
    corpus: Optional[str] = None  # its checksum

    def save(self, directory: str) -> None:
        """Write it into the directory of the search."""
        content = {**self._asdict(), "options": dataclasses.asdict(self.options)}
        write_json(os.path.join(directory, run_files.SEARCH), content)

    def changed(
        self, begun_with: Config, config: Mapping, options: Mapping, run: Mapping
    ) -> Settings:
        """Return it with the flags of a command line that goes on with the search.

        Args:
          begun_with: What all trials have in common, `config` of this search.
          config: Fields of it that the flags set.
          options: Those of SearchOptions.
          run: Those of RunOptions.

        Raises:
          UserError: A flag would make another search of it.
        """
        changeable = may_change(SearchOptions, "resume") | may_change(RunOptions, "resume")
        given = (begun_with, config), (self.options, options), (RunOptions(**self.run), run)
        for old, flags in given:
            new = replaced(old, **flags)
            for name in flags:
                before, after = getattr(old, name), getattr(new, name)
                if name not in changeable and after != before:
                    raise UserError(
                        f"cannot resume: {name} was {before!r} in this search and is {after!r}"
                        " now; to search otherwise, start a new search"
                    )
        return self._replace(
            options=dataclasses.replace(self.options, **options), run={**self.run, **run}
        )


def load_settings(directory: str) -> Settings:
    """Read the settings of the search in a directory.

    Raises:
      UserError: There is none, or its file is damaged.
    """
    path = os.path.join(directory, run_files.SEARCH)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        known = {name: content[name] for name in Settings._fields if name in content}
        known["options"] = from_json(SearchOptions, content["options"], path)
        from_json(RunOptions, content["run"], path)
        return Settings(**{**known, "config": dict(content["config"])})
    except OSError as error:
        raise UserError(f"{directory} holds no search: {path}: {error.strerror}") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error!r}") from error
