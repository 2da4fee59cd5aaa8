"""Open a search: check its settings, and create or load its study."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import optuna
import sqlalchemy
from optuna import pruners, samplers
from optuna.trial import TrialState

from lm.config import Config, RunOptions
from lm.config_file import ConfigFile
from lm.data.corpus import load_corpus_to_train
from lm.errors import RunError, UserError, first_line
from lm.files import locked, write_atomically, write_json
from lm.options import replaced
from lm.record import LOCK_FILE
from lm.search import storage
from lm.search.options import (
    CONFIG_COPY,
    SEARCH_FILE,
    TURN_FILE,
    SearchDirectory,
    SearchOptions,
    Settings,
    parse_search,
)
from lm.search.slots import TrialSlots, divide_hosts
from lm.search.space import Space, Suggest, choose_config, combinations, parse_space, suggest_of


class Search(NamedTuple):
    """A search that is ready to run."""

    directory: str
    settings: Settings
    options: SearchOptions
    file: ConfigFile
    config: Config  # the common config of all trials
    space: Space | Suggest
    slots: list[TrialSlots]
    study: optuna.Study | None = None

    def ask(self) -> optuna.Trial | None:
        """Return an interrupted trial or a new trial, or None if no trial is waiting.

        The trial has a CONFIG, or a FAILURE if its values are invalid.
        """
        with self.turn():
            if TrialState.WAITING not in storage.unfinished_states(self.study, self.options.trials):
                return None
            trial = self.study.ask()
            storage.record_heartbeat(trial)
            if storage.CONFIG not in trial.user_attrs:
                self.study.sampler = _sampler(trial.number, self.options, self.space)
                try:
                    config = choose_config(self.space, trial, self.config)
                    trial.set_user_attr(storage.CONFIG, dataclasses.asdict(config))
                except UserError as error:
                    trial.set_user_attr(storage.FAILURE, str(error))
            return trial

    def turn(self) -> contextlib.AbstractContextManager:
        """Return a context in which no other driver updates the study."""
        return locked(os.path.join(self.directory, TURN_FILE), "updating the search")


def open_search(argv: Sequence[str], stack: contextlib.ExitStack) -> Search:
    """Check a search, and create its directory and its study, or open them.

    If an input is invalid, the directory stays unchanged. The stack unlocks the directory.
    """
    search = _check(argv)
    # All trials would fail if the corpus were missing.
    options = RunOptions(**search.settings.given(RunOptions))
    corpus = load_corpus_to_train(search.config, options).record.sha256
    try:
        os.makedirs(search.directory, exist_ok=True)
        if search.options.storage is None:  # a SQLite file serves one driver
            stack.enter_context(locked(os.path.join(search.directory, LOCK_FILE)))
        with search.turn():
            return _open(_check(argv), corpus)  # another driver may have created the search
    except BlockingIOError:
        raise RunError(
            f"another driver is running the search in {search.directory}; several drivers can"
            " share a search with --storage postgresql://USER@HOST/DATABASE"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write to output_dir {search.directory}: {error}") from error


def _check(argv: Sequence[str]) -> Search:
    """Return the search of a command line after all checks that need no study."""
    arguments, settings = parse_search(argv)
    options, config = arguments[SearchOptions], arguments[Config]
    if options.space is None:
        if options.sampler == "grid":
            raise UserError("sampler grid needs --space, because suggest() has no combinations")
        space = suggest_of(arguments.config_file, config)
    else:
        space = parse_space(options.space, config)
        for name in space.keys() & arguments.given[Config].keys():
            raise UserError(f"--{name} is in --space too; remove one of them")
        if options.sampler == "grid":
            options = replaced(options, trials=len(combinations(space, options.trials)))
            settings = settings._replace(flags={**settings.flags, "trials": options.trials})
    if options.storage:
        try:
            sqlalchemy.create_engine(options.storage)  # imports the driver of the database
        except (ValueError, ImportError, sqlalchemy.exc.ArgumentError) as error:
            raise UserError(
                f"cannot use storage {options.storage!r} ({first_line(error)}); write"
                " postgresql://USER@HOST/DATABASE, and run pip install psycopg2-binary"
            ) from error
    slots = divide_hosts(options.ranks_per_trial, options.parallel_trials, options.hosts)
    directory = arguments[SearchDirectory].output_dir
    return Search(directory, settings, options, arguments.config_file, config, space, slots)


def _open(search: Search, corpus: str) -> Search:
    """Create or load the study. The caller excludes other drivers."""
    directory, options, is_new = search.directory, search.options, not search.settings.corpus
    if not is_new and search.settings.corpus != corpus:
        raise UserError(
            "cannot resume: the corpus is not the corpus of this search. Give its directory"
            " with --data_path, or start a new search"
        )
    settings, copy = search.settings._replace(corpus=corpus), os.path.join(directory, CONFIG_COPY)
    with storage.errors(f"the search in {directory} is unchanged"):
        if is_new:  # the user may change or delete the original config file
            write_atomically(copy, pathlib.Path(search.file.path).read_bytes())
            search.file.loaded.copy_to(directory)
            storage.create_study(directory, settings)
        study = storage.load_study(directory, settings)
        study.pruner = _pruner(options, search.config.num_epochs)
        if options.storage is None:  # the previous driver may have been killed
            storage.interrupt(study, study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
        # Write this file last, because it marks the directory as a search, and names its storage.
        write_json(os.path.join(directory, SEARCH_FILE), settings._asdict())
    file = dataclasses.replace(search.file, path=copy)
    return search._replace(settings=settings, file=file, study=study)


def _sampler(number: int, options: SearchOptions, space: Space | Suggest) -> samplers.BaseSampler:
    """Return the sampler of a trial.

    Each trial has its own seed, so that a resumed search chooses the same values.
    """
    seed = options.search_seed + number
    if options.sampler == "grid":
        values = combinations(space, number + 1)[-1]
        return samplers.PartialFixedSampler(values, samplers.RandomSampler())
    if options.sampler == "tpe":
        # Running trials count as bad, so that the next trial tries different values.
        return samplers.TPESampler(seed=seed, constant_liar=True)
    if options.sampler == "nsgaii":
        return samplers.NSGAIISampler(seed=seed, population_size=max(4, options.trials // 5))
    if options.sampler == "cmaes":
        return samplers.CmaEsSampler(seed=seed)
    return samplers.RandomSampler(seed=seed)


def _pruner(options: SearchOptions, num_epochs: int) -> pruners.BasePruner:
    if options.pruner == "median":
        # A short search would end before Optuna's default of five trials have finished.
        return pruners.MedianPruner(min(5, options.trials // 4))
    if options.pruner == "hyperband":
        return pruners.HyperbandPruner(max_resource=num_epochs)
    return pruners.NopPruner()
