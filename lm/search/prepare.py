"""From a command line to a search: all checks that can fail before the first job."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import optuna

from lm import run_files
from lm.config import Config, RunOptions
from lm.config_file import ConfigFile, load_config_file
from lm.data.corpus import load_corpus_to_train
from lm.errors import RunError, UserError
from lm.files import locked, sha256_of, write_atomically
from lm.options import replaced
from lm.record import from_json
from lm.search.options import SearchOptions, Settings, load_settings
from lm.search.places import TrialSlots, divide_hosts
from lm.search.space import Space, Suggest, check_ranges, combinations, parse_space, suggest_of
from lm.search.study import check_storage, open_study, requeue_interrupted, storage_errors


class Given(NamedTuple):
    """The command line: the name of the config, and the flags that the user gave."""

    config_name: str | None
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    run: Mapping[str, Any]


class Search(NamedTuple):
    """A search that is ready to start or to resume."""

    settings: Settings
    file: ConfigFile  # the copy of the config file in the search directory
    config: Config  # the common config of all trials
    space: Space | Suggest
    grid: list[dict[str, Any]] | None  # the values of each run, for `--sampler grid`
    slots: list[TrialSlots]


def prepare(
    directory: str, resume: bool, given: Given, stack: contextlib.ExitStack
) -> tuple[Search, optuna.Study]:
    """Check a search, and create its directory and its study, or open them.

    Args:
      directory: The search directory.
      resume: Whether the directory may contain a search.
      given: The command line.
      stack: Unlocks the directory when it is closed.

    Raises:
      UserError: If an input is invalid. Nothing has been created.
      RunError: If another driver uses the directory, or if the storage fails.
    """
    given = _with_absolute_paths(given)
    exists = _exists(directory)
    if exists and not resume:
        raise UserError(
            f"output_dir {directory} already contains a search; continue it with --resume, or"
            " choose another directory"
        )
    search = _load(directory, given) if exists else _new(directory, given)
    # Without the corpus, all trials would fail, one by one.
    corpus = load_corpus_to_train(search.config, RunOptions(**search.settings.run))
    try:
        return _open(directory, given, search, corpus.record.sha256, stack)
    except BlockingIOError:
        raise RunError(
            f"another driver is running the search in {directory}; several drivers can share a"
            " search with --storage postgresql://USER@HOST/DATABASE"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write to output_dir {directory}: {error}") from error


def _with_absolute_paths(given: Given) -> Given:
    """Make paths absolute, because --resume may run in another working directory."""
    paths = {
        name: os.path.abspath(given.run[name])
        for name in ("data_path", "data_url", "init_from")
        if given.run.get(name) and ":/" not in given.run[name]  # not an internet address
    }
    return given._replace(run={**given.run, **paths})


def _open(
    directory: str, given: Given, search: Search, corpus: str, stack: contextlib.ExitStack
) -> tuple[Search, optuna.Study]:
    """Lock the directory, and create the search or open it."""
    os.makedirs(directory, exist_ok=True)
    is_shared = search.settings.options.storage is not None
    with contextlib.ExitStack() as turn:
        # Drivers that share a study take turns. The driver of a SQLite file holds the lock.
        holder, activity = (turn, "creating the search") if is_shared else (stack, None)
        holder.enter_context(locked(os.path.join(directory, run_files.LOCK), activity))
        is_new = not _exists(directory)  # another driver may just have created the search
        if is_new:  # the user may change or delete the original config file
            path = os.path.join(directory, run_files.SEARCH_CONFIG)
            write_atomically(path, pathlib.Path(search.file.path).read_bytes())
            search = search._replace(file=dataclasses.replace(search.file, path=path))
        else:
            search = _load(directory, given)
        if search.settings.corpus not in (None, corpus):
            raise UserError(
                "cannot resume: the corpus is not the corpus of this search; give its directory"
                " with --data_path, or start a new search"
            )
        settings = search.settings._replace(corpus=corpus)
        with storage_errors(f"nothing has started or changed in {directory}"):
            study = open_study(settings, directory, search.grid, is_new)
            if not is_shared:
                requeue_interrupted(study)
        # Written last, because it marks the directory as a search, and names its storage.
        settings.save(directory)
        return search._replace(settings=settings), study


def _exists(directory: str) -> bool:
    return os.path.exists(os.path.join(directory, run_files.SEARCH))


def _new(directory: str, given: Given) -> Search:
    options = SearchOptions(**given.options)
    special = set("?{}") & set(directory)
    if special and not options.storage:
        raise UserError(
            f"output_dir {directory} contains {special.pop()}, which the address of a SQLite file"
            " cannot contain; choose another directory"
        )
    file = load_config_file("config_small" if given.config_name is None else given.config_name)
    RunOptions(**given.run)
    config = dataclasses.asdict(replaced(file.config, **given.config))
    name = f"{config['name']}-{uuid.uuid4().hex[:8]}"  # other searches may share the storage
    return _check(Settings(name, config, options, given.run), file, given.config)


def _load(directory: str, given: Given) -> Search:
    path = os.path.join(directory, run_files.SEARCH_CONFIG)
    file = load_config_file(path if given.config_name is None else given.config_name)
    if file.sha256 != sha256_of(path):
        raise UserError(
            f"cannot resume: {given.config_name} differs from the config file of this search;"
            f" without --config, the search uses its copy, {path}"
        )
    settings = load_settings(directory)
    source = os.path.join(directory, run_files.SEARCH)
    common = from_json(type(file.config), settings.config, source)
    settings = settings.changed(common, given.config, given.options, given.run)
    return _check(settings, dataclasses.replace(file, path=path))


def _check(settings: Settings, file: ConfigFile, flags: Mapping[str, Any] = {}) -> Search:
    options, grid = settings.options, None
    config = replaced(file.config, **settings.config)
    space: Space | Suggest
    if options.space is None:
        if options.sampler == "grid":
            raise UserError("sampler grid needs --space, because suggest() has no combinations")
        space = suggest_of(file, config)
    else:
        space = parse_space(options.space, config)
        for name in space.keys() & flags.keys():
            raise UserError(f"--{name} is in --space too; remove one of them")
        if options.sampler == "grid":
            grid = combinations(space, options.trials)
            options = dataclasses.replace(options, trials=len(grid))
        if options.sampler == "cmaes":
            check_ranges(space)
    check_storage(options)
    slots = divide_hosts(options.ranks_per_trial, options.parallel_trials, options.hosts)
    return Search(settings._replace(options=options), file, config, space, grid, slots)
