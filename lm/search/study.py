"""Open a search: check its settings, and open its study in SQLite or PostgreSQL.

A run has one choice of values and one run directory. If a run is interrupted, Optuna's trial fails,
and a new trial with the same values continues the run. Therefore a run has one or more trials, and
the number of the run differs from the numbers of its trials.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import pathlib
import uuid
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optuna
import sqlalchemy
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from lm.config import Config, RunOptions
from lm.config_file import ConfigFile, load_config_file
from lm.data.corpus import load_corpus_to_train
from lm.errors import RunError, UserError, first_line
from lm.files import locked, sha256_of, write_atomically
from lm.options import replaced
from lm.record import LOCK_FILE, from_json
from lm.search.options import (
    CONFIG_COPY,
    SEARCH_FILE,
    STUDY_FILE,
    SearchOptions,
    Settings,
    load_settings,
)
from lm.search.space import Space, Suggest, combinations, parse_space, suggest_of
from lm.search.trial import TrialSlots, divide_hosts

# User attributes of a trial.
RUN = "run"  # number of the run
CONFIG = "config"  # the fields of its config
FAILURE = "failure"  # why the run failed; an interrupted trial has no such attribute

_HEARTBEAT_SECONDS = 60
_GRACE_SECONDS = 180

optuna.logging.set_verbosity(optuna.logging.ERROR)
# Heartbeats are experimental, and an epoch may be reported twice.
warnings.filterwarnings("ignore", module="optuna")
warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)

# Adds a trial that continues the run of a failed trial.
requeue = RetryHeartbeatStaleTrialCallback(inherit_intermediate_values=True)


class Given(NamedTuple):
    """The command line: the name of the config, and the flags that the user gave."""

    config_name: str | None
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    run: Mapping[str, Any]


class Search(NamedTuple):
    """A search that is ready to start or to resume."""

    directory: str
    settings: Settings
    file: ConfigFile
    config: Config  # the common config of all trials
    space: Space | Suggest
    slots: list[TrialSlots]
    study: optuna.Study | None = None


def open_search(directory: str, resume: bool, given: Given, stack: contextlib.ExitStack) -> Search:
    """Check a search, and create its directory and its study, or open them.

    If an input is invalid, the directory stays unchanged. The stack unlocks the directory.
    """
    paths = {  # absolute, because --resume may run in another working directory
        name: os.path.abspath(given.run[name])
        for name in ("data_path", "data_url", "init_from")
        if given.run.get(name) and ":/" not in given.run[name]
    }
    given = given._replace(run={**given.run, **paths})
    if _exists(directory) and not resume:
        raise UserError(
            f"output_dir {directory} already contains a search; continue it with --resume, or"
            " choose a different directory"
        )
    search = _check(directory, given)
    # All trials would fail if the corpus were missing.
    corpus = load_corpus_to_train(search.config, RunOptions(**search.settings.run))
    is_shared = search.settings.options.storage is not None
    try:
        os.makedirs(directory, exist_ok=True)
        with contextlib.ExitStack() as turn:
            # Drivers that share a study take turns. The driver of a SQLite file keeps the lock.
            holder, activity = (turn, "creating the search") if is_shared else (stack, None)
            holder.enter_context(locked(os.path.join(directory, LOCK_FILE), activity))
            return _open(_check(directory, given), corpus.record.sha256)
    except BlockingIOError:
        raise RunError(
            f"another driver is running the search in {directory}; several drivers can share a"
            " search with --storage postgresql://USER@HOST/DATABASE"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write to output_dir {directory}: {error}") from error


def _exists(directory: str) -> bool:
    return os.path.exists(os.path.join(directory, SEARCH_FILE))


def _check(directory: str, given: Given) -> Search:
    """Return the search in a directory, or a new search, after all checks that need no study."""
    if _exists(directory):
        file, settings = _load(directory, given)
    else:
        file = load_config_file("config_small" if given.config_name is None else given.config_name)
        config = dataclasses.asdict(replaced(file.config, **given.config))
        RunOptions(**given.run)  # checks the values
        name = f"{config['name']}-{uuid.uuid4().hex[:8]}"  # other searches may share the storage
        settings = Settings(name, config, SearchOptions(**given.options), given.run)
    options = settings.options
    config = replaced(file.config, **settings.config)
    if options.space is None:
        if options.sampler == "grid":
            raise UserError("sampler grid needs --space, because suggest() has no combinations")
        space = suggest_of(file, config)
    else:
        space = parse_space(options.space, config)
        for name in space.keys() & given.config.keys():
            raise UserError(f"--{name} is in --space too; remove one of them")
        if options.sampler == "grid":
            num_trials = len(combinations(space, options.trials))
            settings = settings._replace(options=replaced(options, trials=num_trials))
    if options.storage:
        _check_storage(options.storage)
    slots = divide_hosts(options.ranks_per_trial, options.parallel_trials, options.hosts)
    return Search(directory, settings, file, config, space, slots)


def _load(directory: str, given: Given) -> tuple[ConfigFile, Settings]:
    path = os.path.join(directory, CONFIG_COPY)
    file = load_config_file(path if given.config_name is None else given.config_name)
    if file.sha256 != sha256_of(path) or not file.loaded.is_copied_to(directory):
        raise UserError(
            f"cannot resume: {given.config_name} differs from the config file of this search. Omit"
            f" --config to use the copy {path}"
        )
    settings = load_settings(directory)
    common = from_json(type(file.config), settings.config, SEARCH_FILE)
    settings = settings.changed(common, given.config, given.options, given.run)
    return dataclasses.replace(file, path=path), settings


def _open(search: Search, corpus: str) -> Search:
    """Create or open the study. The caller holds the lock of the search directory."""
    directory, file, is_new = search.directory, search.file, not _exists(search.directory)
    settings = search.settings._replace(corpus=corpus)
    if search.settings.corpus not in (None, corpus):
        raise UserError(
            "cannot resume: the corpus is not the corpus of this search. Give its directory"
            " with --data_path, or start a new search"
        )
    if is_new:  # the user may change or delete the original config file
        path = os.path.join(directory, CONFIG_COPY)
        write_atomically(path, pathlib.Path(file.path).read_bytes())
        file.loaded.copy_to(directory)
        file = dataclasses.replace(file, path=path)
    with storage_errors(f"the search in {directory} is unchanged"):
        study = open_study(settings, directory, search.space, is_new)
    # Write this file last, because it marks the directory as a search, and names its storage.
    settings.save(directory)
    return search._replace(settings=settings, file=file, study=study)


def _check_storage(storage: str) -> None:
    try:
        url = sqlalchemy.make_url(storage)
        sqlalchemy.create_engine(url)  # imports the package that connects to the database
    except (ValueError, ImportError, sqlalchemy.exc.ArgumentError) as error:
        raise UserError(
            f"cannot use storage {storage!r} ({first_line(error)}); write"
            " postgresql://USER@HOST/DATABASE, and run pip install psycopg2-binary"
        ) from error
    if url.password:  # `ps` would show the password to all users of the host
        raise UserError("storage: put the password into ~/.pgpass or PGPASSWORD, not the address")


def storage_url(directory: str, storage: str | None) -> str:
    """Return the address of the study: `--storage`, or a SQLite file in the search directory."""
    path = os.path.join(directory, STUDY_FILE)
    return storage or sqlalchemy.URL.create("sqlite", database=path).render_as_string()


def open_study(
    settings: Settings, directory: str, space: Space | Suggest, is_new: bool
) -> optuna.Study:
    """Create the study of a search, or open it."""
    options, grid = settings.options, None
    if options.sampler == "grid":
        grid = combinations(space, options.trials)
    storage = _Storage(
        storage_url(directory, options.storage),
        # A study in a file has one driver, whose lock shows whether it is alive.
        heartbeat_interval=_HEARTBEAT_SECONDS if options.storage else None,
        grace_period=_GRACE_SECONDS,
        heartbeat_stale_trial_callback=requeue,
    )
    if is_new:
        optuna.create_study(study_name=settings.study, storage=storage)
    sampler, pruner = _RunSampler(options, grid), _pruner(settings)
    study = load_study(settings.study, storage, sampler=sampler, pruner=pruner)
    if not options.storage:
        requeue_interrupted(study)
    return study


def load_study(name: str, storage: str | RDBStorage, **options: Any) -> optuna.Study:
    """Load a study with options of `optuna.load_study`."""
    try:
        return optuna.load_study(study_name=name, storage=storage, **options)
    except KeyError:
        raise UserError(
            f"the storage does not contain the study {name}; give the --storage in which this"
            " search was created"
        ) from None


def requeue_interrupted(study: optuna.Study) -> None:
    """Requeue the runs of a driver that was killed. The study must not have a live driver."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    for trial in runs(study):
        if trial.state == TrialState.FAIL and FAILURE not in trial.user_attrs:
            requeue(study, trial)


def runs(study: optuna.Study) -> list[FrozenTrial]:
    """Return the newest trial of each run, in the order of the runs."""
    trials = study.get_trials(deepcopy=False)
    newest = {trial.user_attrs[RUN]: trial for trial in trials if RUN in trial.user_attrs}
    return [newest[number] for number in sorted(newest)]


def best_runs(study: optuna.Study, count: int) -> list[FrozenTrial]:
    """Return the finished runs with the lowest validation perplexity, best first."""
    finished = [trial for trial in runs(study) if trial.state == TrialState.COMPLETE]
    return sorted(finished, key=lambda trial: trial.value)[:count]


@contextlib.contextmanager
def storage_errors(what_to_do: str) -> Iterator[None]:
    """Turn the errors of a lost storage or a full disk into one line."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise RunError(f"{where}{error.strerror or error}; {what_to_do}") from error
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        cause = error.__cause__ or error
        line = first_line(getattr(cause, "orig", None) or cause)
        raise RunError(f"cannot use the study ({line}); {what_to_do}") from error


class _Storage(RDBStorage):
    """A storage whose heartbeats survive a short loss of the database."""

    def record_heartbeat(self, trial_id: int) -> None:
        with contextlib.suppress(
            optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError
        ):
            super().record_heartbeat(trial_id)


class _RunSampler(BaseSampler):
    """One of Optuna's samplers, with a seed for each value of each run.

    A resumed search chooses the same values as an uninterrupted search, even if the driver was
    killed between two values of a run.
    """

    def __init__(self, options: SearchOptions, grid: Sequence[Mapping[str, Any]] | None):
        self._options, self._grid = options, grid

    def infer_relative_search_space(self, study, trial):
        return self._seeded(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study, trial, search_space):
        numbered = copy.copy(trial)
        numbered.number = trial.user_attrs[RUN]  # CMA-ES adds the number of the trial to its seed
        return self._seeded(trial).sample_relative(study, numbered, search_space)

    def sample_independent(self, study, trial, param_name, param_distribution):
        if self._grid:
            return self._grid[trial.user_attrs[RUN]][param_name]
        sampler = self._seeded(trial, param_name)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def _seeded(self, trial: FrozenTrial, name: str = "") -> BaseSampler:
        seed = self._options.search_seed + trial.user_attrs[RUN] + zlib.crc32(name.encode())
        sampler = {
            # Running trials count as bad, so that the next trial tries different values.
            "tpe": functools.partial(optuna.samplers.TPESampler, constant_liar=True),
            "cmaes": optuna.samplers.CmaEsSampler,
            "nsgaii": functools.partial(
                optuna.samplers.NSGAIISampler, population_size=max(4, self._options.trials // 5)
            ),
        }.get(self._options.sampler, optuna.samplers.RandomSampler)
        return sampler(seed=seed % 2**32)


def _pruner(settings: Settings) -> optuna.pruners.BasePruner:
    if settings.options.pruner == "median":
        # A short search would end before Optuna's default of five trials have finished.
        return optuna.pruners.MedianPruner(min(5, settings.options.trials // 4))
    if settings.options.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(max_resource=settings.config["num_epochs"])
    return optuna.pruners.NopPruner()
