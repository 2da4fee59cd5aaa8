"""The study: which trials there are, kept by Optuna in SQLite or PostgreSQL."""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Optional, Union

import optuna
import sqlalchemy.exc
from optuna.distributions import BaseDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from lm import run_files
from lm.errors import RunError, UserError, first_line
from lm.files import locked
from lm.report.search import FAILURES, storage_url
from lm.search.options import SearchOptions, Settings
from lm.search.space import Space, Suggest, combinations

_SILENT_BEATS = 3  # without a heartbeat, and a driver is dead
# A trial that was taken over, and is finished, while this driver was held up, stays as it is.
_unless_finished = contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError)

# Of what is experimental there, and that its heartbeat must be recorded, which is done here.
warnings.filterwarnings("ignore", module="optuna")


@contextlib.contextmanager
def storage_errors(what_to_do: str) -> Iterator[None]:
    """Turn what a vanished storage, or a full disk, raises into one line."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise RunError(f"{where}{error.strerror or error}; {what_to_do}") from error
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        cause = error.__cause__ or error
        line = first_line(getattr(cause, "orig", None) or cause)
        raise RunError(f"the study cannot be used: {line}; {what_to_do}") from error


class Study:
    """The trials of a search, as this driver sees and changes them.

    Without `--storage` the driver is alone, and the caller holds the lock of the directory. With
    it, drivers take turns at choosing trials, and take over those of a driver that is silent.

    Args:
      settings: Of the search.
      directory: Of the search.
      space: What is tried.
      is_new: Whether the study is to be made; else it must be there.

    Attributes:
      optuna: The study itself.

    Raises:
      UserError: The storage does not have the study.
    """

    def __init__(
        self, settings: Settings, directory: str, space: Union[Space, Suggest], is_new: bool
    ):
        self._options, self._lock = settings.options, os.path.join(directory, run_files.LOCK)
        self._is_shared = settings.options.storage is not None
        self._interval = settings.options.heartbeat_seconds if self._is_shared else None
        self._last_beat = -math.inf
        is_grid = settings.options.sampler == "grid"
        self.num_trials = settings.options.trials
        self._grid = combinations(space, self.num_trials) if is_grid else None
        url = storage_url(directory, settings.options.storage)
        self._storage = RDBStorage(
            url,
            heartbeat_interval=self._interval,
            grace_period=_SILENT_BEATS * settings.options.heartbeat_seconds,
        )
        if is_new:
            optuna.create_study(study_name=settings.study, storage=self._storage)
        try:
            self.optuna = optuna.load_study(
                study_name=settings.study, storage=self._storage, pruner=_pruner(settings)
            )
        except KeyError:
            raise UserError(
                f"{url} does not have the study {settings.study}: give the --storage in which"
                " this search was made"
            ) from None
        if not self._is_shared:  # the lock says that no other driver lives
            for trial in self.trials(TrialState.RUNNING):
                self._let_wait(trial._trial_id)

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials that are in one of these states."""
        return self.optuna.get_trials(deepcopy=False, states=states or None)

    def claim(self) -> Optional[optuna.Trial]:
        """Return a trial for this driver to run, one that was interrupted first, or None."""
        with self.turn():
            if self._is_shared:
                # Silent ones go back to those that wait, with a heartbeat, so that it is once.
                for trial_id in self._storage._get_stale_trial_ids(self.optuna._study_id):
                    self._storage.record_heartbeat(trial_id)
                    self._let_wait(trial_id)
            waiting = self.trials(TrialState.WAITING)
            number = waiting[0].number if waiting else len(self.trials())
            if number >= self.num_trials and not waiting:
                return None
            if not waiting:
                self.optuna.enqueue_trial(self._grid[number] if self._grid else {})
                waiting = self.trials(TrialState.WAITING)
            if self._is_shared:  # before it runs: without one it would run for ever after a kill
                self._storage.record_heartbeat(waiting[0]._trial_id)
            # Seeded anew for each trial: a search that is resumed must neither draw the numbers of
            # its first trials again, nor others than it would have drawn.
            self.optuna.sampler = _SeedByName(self._options, self._options.search_seed + number)
            return self.optuna.ask()

    def reported(self, trial: optuna.Trial) -> Collection[int]:
        """Return the epochs whose perplexity is in the study."""
        return self._storage.get_trial(trial._trial_id).intermediate_values.keys()

    def release(self, trial: optuna.Trial) -> None:
        """Let a trial that has been stopped be claimed again, here or by another driver."""
        self._let_wait(trial._trial_id)

    def _let_wait(self, trial_id: int) -> None:
        with _unless_finished:
            self._storage.set_trial_state_values(trial_id, TrialState.WAITING)

    def report(self, trial: optuna.Trial, perplexity: float, epoch: int) -> None:
        """Note the validation perplexity of an epoch of a trial."""
        with _unless_finished:
            trial.report(perplexity, epoch)

    def tell(self, trial: optuna.Trial, state: TrialState, value: Optional[float] = None) -> None:
        """Finish a trial; one that another driver has finished stays as it is."""
        # Taken over while this driver was held up: whoever runs it next finds its run finished.
        with _unless_finished, contextlib.suppress(ValueError):
            self.optuna.tell(trial, value, state, skip_if_finished=True)

    def add_failure(self, trial: optuna.Trial, reason: str) -> int:
        """Note why a job of a trial has failed; returns how many have."""
        failures = [*trial.user_attrs.get(FAILURES, []), reason]
        self.mark(trial, FAILURES, failures)
        return len(failures)

    def mark(self, trial: optuna.Trial, name: str, value: Any) -> None:
        """Set an attribute of a trial."""
        with _unless_finished:
            trial.set_user_attr(name, value)

    def beat(self, trials: Sequence[optuna.Trial]) -> None:
        """Say, when it is time, that this driver lives and runs these trials."""
        if self._is_shared and time.monotonic() - self._last_beat >= self._interval:
            self._last_beat = time.monotonic()
            for trial in trials:
                self._storage.record_heartbeat(trial._trial_id)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let no other driver choose a trial meanwhile, nor end the search."""
        with contextlib.ExitStack() as stack:
            if self._is_shared:
                stack.enter_context(locked(self._lock, "choosing a trial"))
            yield


def check_storage(options: SearchOptions) -> None:
    """Refuse a storage that cannot be used, before anything is made.

    Raises:
      UserError: It is none for several drivers, or its driver is not installed.
    """
    if options.storage is None:
        return
    try:
        url = sqlalchemy.make_url(options.storage)
        if url.get_backend_name() != "postgresql":
            raise ValueError("another database")
        sqlalchemy.create_engine(url)
    except (ValueError, sqlalchemy.exc.ArgumentError) as error:
        raise UserError(
            f"storage must be like postgresql://USER@HOST/DATABASE, not {options.storage!r}; for"
            " one driver leave it out"
        ) from error
    except ImportError as error:
        raise UserError(
            f"storage {options.storage} cannot be used ({error}): pip install psycopg2-binary"
        ) from error
    if url.password:  # which ps would show to all users of the host
        raise UserError("storage: put the password into ~/.pgpass or PGPASSWORD, not the address")


class _SeedByName(optuna.samplers.BaseSampler):
    """A sampler with a seed for each parameter, which its name decides.

    With one seed for all, a trial whose driver was killed between two of its values would go on
    with another second one: what is in the study already is not drawn again.
    """

    def __init__(self, options: SearchOptions, seed: int):
        self._options, self._seed = options, seed
        self._of_trial = _sampler(options, seed)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict:
        return self._of_trial.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict
    ) -> dict[str, Any]:
        return self._of_trial.sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        seed = (self._seed + zlib.crc32(param_name.encode())) % 2**32
        sampler = _sampler(self._options, seed)
        return sampler.sample_independent(study, trial, param_name, param_distribution)


def _sampler(options: SearchOptions, seed: int) -> optuna.samplers.BaseSampler:
    samplers: dict[str, Any] = {
        # Trials that still run count as bad: the next one is to be tried elsewhere.
        "tpe": lambda: optuna.samplers.TPESampler(constant_liar=True, seed=seed),
        "cmaes": lambda: optuna.samplers.CmaEsSampler(seed=seed),
        "nsgaii": lambda: optuna.samplers.NSGAIISampler(
            population_size=max(4, options.trials // 5), seed=seed
        ),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "grid": lambda: optuna.samplers.RandomSampler(seed=seed),  # all values are given
    }
    return samplers[options.sampler]()


def _pruner(settings: Settings) -> optuna.pruners.BasePruner:
    if settings.options.pruner == "median":
        # A short search would be over before Optuna's five have shown what is usual.
        return optuna.pruners.MedianPruner(min(5, settings.options.trials // 4))
    if settings.options.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(max_resource=settings.config["num_epochs"])
    return optuna.pruners.NopPruner()
