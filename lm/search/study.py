"""The study: Optuna's record of the trials, in SQLite or PostgreSQL.

A run has one choice of values and one run directory. If a run is interrupted, Optuna's trial fails,
and a new trial with the same values continues the run. Therefore a run has one or more trials, and
the number of the run differs from the numbers of its trials.
"""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optuna
import sqlalchemy
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from lm import run_files
from lm.errors import RunError, UserError, first_line
from lm.search.options import SearchOptions, Settings

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


def storage_url(directory: str, storage: str | None) -> str:
    """Return the address of the study: `--storage`, or a SQLite file in the search directory."""
    path = os.path.join(directory, run_files.STUDY)
    return storage or sqlalchemy.URL.create("sqlite", database=path).render_as_string()


def open_study(
    settings: Settings, directory: str, grid: Sequence[Mapping[str, Any]] | None, is_new: bool
) -> optuna.Study:
    """Create the study of a search, or open it.

    Args:
      settings: The settings of the search.
      directory: The search directory.
      grid: The values of each run, for `--sampler grid`; otherwise None.
      is_new: Whether to create the study.

    Raises:
      UserError: If the storage does not contain the study.
    """
    options = settings.options
    url = storage_url(directory, options.storage)
    storage = _Storage(
        url,
        # A study in a file has one driver, whose lock shows whether it is alive.
        heartbeat_interval=_HEARTBEAT_SECONDS if options.storage else None,
        grace_period=_GRACE_SECONDS,
        heartbeat_stale_trial_callback=requeue,
    )
    if is_new:
        optuna.create_study(study_name=settings.study, storage=storage)
    try:
        return optuna.load_study(
            study_name=settings.study,
            storage=storage,
            sampler=_RunSampler(options, grid),
            pruner=_pruner(settings),
        )
    except KeyError:
        raise UserError(
            f"{url} does not contain the study {settings.study}; give the --storage in which this"
            " search was created"
        ) from None


def runs(study: optuna.Study) -> list[FrozenTrial]:
    """Return the newest trial of each run, in the order of the runs."""
    trials = study.get_trials(deepcopy=False)
    newest = {trial.user_attrs[RUN]: trial for trial in trials if RUN in trial.user_attrs}
    return [newest[number] for number in sorted(newest)]


def best_runs(study: optuna.Study, count: int) -> list[FrozenTrial]:
    """Return the finished runs with the lowest validation perplexity, best first."""
    finished = [trial for trial in runs(study) if trial.state == TrialState.COMPLETE]
    return sorted(finished, key=lambda trial: trial.value)[:count]


def requeue_interrupted(study: optuna.Study) -> None:
    """Requeue the runs of a driver that was killed. No driver may be running."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    for trial in runs(study):
        if trial.state == TrialState.FAIL and FAILURE not in trial.user_attrs:
            requeue(study, trial)


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
        raise RunError(f"cannot use the study: {line}; {what_to_do}") from error


def check_storage(options: SearchOptions) -> None:
    """Check `--storage` before anything is created.

    Raises:
      UserError: If the storage does not support several drivers, or if its package is missing.
    """
    if options.storage is None:
        return
    try:
        url = sqlalchemy.make_url(options.storage)
        if url.get_backend_name() != "postgresql":
            raise ValueError("not PostgreSQL")
        sqlalchemy.create_engine(url)
    except (ValueError, sqlalchemy.exc.ArgumentError) as error:
        raise UserError(
            f"storage must be like postgresql://USER@HOST/DATABASE, not {options.storage!r}; omit"
            " it to use one driver"
        ) from error
    except ImportError as error:
        raise UserError(
            f"cannot use storage {options.storage} ({error}); run pip install psycopg2-binary"
        ) from error
    if url.password:  # ps would show it to all users of the host
        raise UserError("storage: put the password into ~/.pgpass or PGPASSWORD, not the address")


class _Storage(RDBStorage):
    """A storage whose heartbeats survive a short loss of the database."""

    def record_heartbeat(self, trial_id: int) -> None:
        with contextlib.suppress(
            optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError
        ):
            super().record_heartbeat(trial_id)


class _RunSampler(BaseSampler):
    """One of Optuna's samplers, with a seed for each value of each run.

    A resumed search must neither repeat the values of its first runs nor choose different values
    than an uninterrupted search. A driver may be killed between two values of a run.
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
        return _sampler(self._options, seed % 2**32)


def _sampler(options: SearchOptions, seed: int) -> BaseSampler:
    if options.sampler == "tpe":
        # Running trials count as bad, so that the next trial tries other values.
        return optuna.samplers.TPESampler(constant_liar=True, seed=seed)
    if options.sampler == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=seed)
    if options.sampler == "nsgaii":
        population_size = max(4, options.trials // 5)
        return optuna.samplers.NSGAIISampler(population_size=population_size, seed=seed)
    return optuna.samplers.RandomSampler(seed=seed)


def _pruner(settings: Settings) -> optuna.pruners.BasePruner:
    if settings.options.pruner == "median":
        # A short search would end before Optuna's default of five trials have finished.
        return optuna.pruners.MedianPruner(min(5, settings.options.trials // 4))
    if settings.options.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(max_resource=settings.config["num_epochs"])
    return optuna.pruners.NopPruner()
