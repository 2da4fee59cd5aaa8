"""From a command line to a search that is ready: all that can fail before the first job."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional, Union

from lm import run_files
from lm.config import Config, RunOptions
from lm.config_file import ConfigFile, load_config_file
from lm.data.corpus import load_corpus_to_train
from lm.errors import RunError, UserError
from lm.files import locked, sha256_of, write_atomically
from lm.options import replaced
from lm.search.options import SearchOptions, Settings, load_settings
from lm.search.places import Place, make_places
from lm.search.space import Space, Suggest, check_ranges, combinations, parse_space, suggest_of
from lm.search.study import Study, check_storage, storage_errors


class Given(NamedTuple):
    """What the command line has: the config's name, and flags by name."""

    config_name: Optional[str]
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    run: Mapping[str, Any]


class Prepared(NamedTuple):
    """A search that is ready to start, or to go on."""

    settings: Settings
    file: ConfigFile  # the search's copy of its config file
    config: Config  # what all trials have in common: that, with the flags
    space: Union[Space, Suggest]
    places: list[Place]


def prepare(
    directory: str, resume: bool, given: Given, stack: contextlib.ExitStack
) -> tuple[Prepared, Study]:
    """Check a search and make its directory and its study, or find them there.

    Args:
      directory: Of the search.
      resume: Whether there may be one already.
      given: The command line.
      stack: Frees the directory when it is closed.

    Returns:
      The search and its study.

    Raises:
      UserError: Something given cannot be used; nothing has been made.
      RunError: Another driver uses the directory, or the storage cannot be used.
    """
    given = _absolute(given)
    found = _find(directory, resume, given)
    # As each trial will: a corpus that is not there would fail them all, one by one.
    corpus = load_corpus_to_train(found.config, RunOptions(**found.settings.run))
    try:
        return _begin(directory, given, found, corpus.record.sha256, stack)
    except BlockingIOError:
        raise RunError(
            f"another driver is running the search in {directory}; several can share one with"
            " --storage postgresql://USER@HOST/DATABASE"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write to output_dir {directory}: {error}") from error


def _absolute(given: Given) -> Given:
    """Make its paths absolute: --resume may come from another directory."""
    paths = {
        name: os.path.abspath(given.run[name])
        for name in ("data_path", "data_url", "init_from")
        if given.run.get(name) and ":/" not in given.run[name]  # an address
    }
    return given._replace(run={**given.run, **paths})


def _find(directory: str, resume: bool, given: Given) -> Prepared:
    """Check a search that is new, or the one that is there."""
    if _exists(directory):
        if resume:
            return _old(directory, given)
        raise UserError(
            f"output_dir {directory} already holds a search: continue it with --resume, or choose"
            " another one"
        )
    found = _new(given)
    special = set("?{}") & set(directory)
    if special and not found.settings.options.storage:
        raise UserError(
            f"output_dir {directory} has a {special.pop()}, which the address of a study's file"
            " cannot have"
        )
    return found


def _begin(
    directory: str, given: Given, found: Prepared, corpus: str, stack: contextlib.ExitStack
) -> tuple[Prepared, Study]:
    """Make the directory and the study, or open them, when it is this driver's turn."""
    os.makedirs(directory, exist_ok=True)
    is_shared = found.settings.options.storage is not None
    with contextlib.ExitStack() as turn:
        # Drivers that share a storage take turns; one with a file of its own stays alone.
        holder, waiting = (turn, "making the search") if is_shared else (stack, None)
        holder.enter_context(locked(os.path.join(directory, run_files.LOCK), waiting))
        # Once more: another driver may have made it meanwhile.
        is_new = not _exists(directory)
        found = _make(directory, found) if is_new else _old(directory, given)
        found = _with_corpus(found, corpus)
        with storage_errors(f"nothing has begun or changed in {directory}"):
            study = Study(found.settings, directory, found.space, is_new)
        # Last of all: it says that a search is here, and with which storage it goes on.
        found.settings.save(directory)
        return found, study


def _exists(directory: str) -> bool:
    return os.path.exists(os.path.join(directory, run_files.SEARCH))


def _new(given: Given) -> Prepared:
    file = load_config_file("config_small" if given.config_name is None else given.config_name)
    RunOptions(**given.run)
    config = dataclasses.asdict(replaced(file.config, **given.config))
    name = f"{config['name']}-{uuid.uuid4().hex[:8]}"  # other searches may share the storage
    settings = Settings(name, config, SearchOptions(**given.options), given.run)
    return _checked(settings, file, given.config)


def _old(directory: str, given: Given) -> Prepared:
    path = os.path.join(directory, run_files.SEARCH_CONFIG)
    file = load_config_file(path if given.config_name is None else given.config_name)
    if file.sha256 != sha256_of(path):
        raise UserError(
            f"cannot resume: this search did not begin with {given.config_name} as it is now;"
            f" without --config it goes on with its copy, {path}"
        )
    settings = load_settings(directory)
    begun_with = replaced(file.config, **settings.config)
    settings = settings.changed(begun_with, given.config, given.options, given.run)
    return _checked(settings, dataclasses.replace(file, path=path))


def _checked(settings: Settings, file: ConfigFile, flags: Mapping[str, Any] = {}) -> Prepared:
    options = settings.options
    config = replaced(file.config, **settings.config)
    space: Union[Space, Suggest]
    if options.space is None:
        space = suggest_of(file, config)
    else:
        space = parse_space(options.space, config)
        for name in space.keys() & flags.keys():
            raise UserError(f"--{name} is in --space too: leave one of them out")
    if options.sampler == "grid":
        if options.space is None:
            raise UserError("sampler grid needs --space: suggest() says no combinations")
        options = dataclasses.replace(options, trials=len(combinations(space, options.trials)))
        settings = settings._replace(options=options)
    if options.sampler == "cmaes" and options.space is not None:
        check_ranges(space)
    check_storage(options)
    places = make_places(options.ranks_per_trial, options.parallel_trials, options.hosts)
    return Prepared(settings, file, config, space, places)


def _with_corpus(found: Prepared, checksum: str) -> Prepared:
    """Keep the corpus of the first trials: another one's perplexities do not compare with it."""
    if found.settings.corpus not in (None, checksum):
        raise UserError(
            "cannot resume: the corpus is not the one that this search began with: give its"
            " directory with --data_path, or start a new search"
        )
    return found._replace(settings=found.settings._replace(corpus=checksum))


def _make(directory: str, found: Prepared) -> Prepared:
    """Keep the config file, whatever becomes of the user's."""
    path = os.path.join(directory, run_files.SEARCH_CONFIG)
    with open(found.file.path, "rb") as file:
        write_atomically(path, file.read())
    return found._replace(file=dataclasses.replace(found.file, path=path))
