"""The Optuna study of a search, stored in SQLite or PostgreSQL.

If a trial is interrupted, its state becomes WAITING again, and a driver continues its run.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator

import optuna
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from lm.errors import RunError, UserError, first_line
from lm.search.options import STUDY_FILE, Settings

# User attributes of a trial.
CONFIG = "config"  # the fields of its config
NUM_FAILURES = "num_failures"  # number of its failed jobs
FAILURE = "failure"  # why the trial failed
# User attribute of the study.
TEST = "test"  # the number of the tested trial, and its perplexity

HEARTBEAT_SECONDS = 60
_HEARTBEATS_UNTIL_DEATH = 3

optuna.logging.set_verbosity(optuna.logging.ERROR)
# Heartbeats are experimental, and an epoch may be reported twice.
warnings.filterwarnings("ignore", module="optuna")
warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


def create_study(directory: str, settings: Settings) -> None:
    """Create the study of a new search."""
    optuna.create_study(study_name=settings.study, storage=_storage(directory, settings))


def load_study(directory: str, settings: Settings) -> optuna.Study:
    """Load the study of a search from `--storage`, or from the search directory."""
    try:
        return optuna.load_study(study_name=settings.study, storage=_storage(directory, settings))
    except KeyError:
        raise UserError(
            f"the storage does not contain the study {settings.study}; give the --storage in which"
            " this search was created"
        ) from None


def _storage(directory: str, settings: Settings) -> RDBStorage:
    path = os.path.join(directory, STUDY_FILE)
    file = sqlalchemy.URL.create("sqlite", database=path).render_as_string()
    return RDBStorage(
        settings.flags.get("storage") or file,
        heartbeat_interval=HEARTBEAT_SECONDS,
        grace_period=HEARTBEAT_SECONDS * _HEARTBEATS_UNTIL_DEATH,
    )


@contextlib.contextmanager
def errors(what_to_do: str) -> Iterator[None]:
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


def unfinished_states(study: optuna.Study, num_trials: int) -> list[TrialState]:
    """Return RUNNING or WAITING for each trial that is not finished."""
    states = [trial.state for trial in study.get_trials(deepcopy=False)]
    states += [TrialState.WAITING] * (num_trials - len(states))
    return [state for state in states if not state.is_finished()]


def best_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the finished trials, in the order of their validation perplexities."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(finished, key=lambda trial: trial.value)


def record_heartbeat(trial: optuna.Trial) -> None:
    """Show other drivers that the driver of a trial is alive."""
    trial.storage.record_heartbeat(trial._trial_id)


def finish(trial: optuna.Trial, state: TrialState, value: float | None = None) -> FrozenTrial:
    """Record the result of a trial in the study, and return the finished trial.

    Raises:
      UpdateFinishedTrialError: If another driver has finished the trial.
    """
    # If this driver was suspended, another driver may have interrupted the trial.
    trial.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
    return trial.study.tell(trial, value, state)


def interrupt_stale(study: optuna.Study) -> None:
    """Interrupt the trials of dead drivers. The caller excludes other drivers."""
    stale = study._storage._get_stale_trial_ids(study._study_id)
    trials = study.get_trials(deepcopy=False)
    interrupt(study, [trial for trial in trials if trial._trial_id in stale])


def interrupt(study: optuna.Study, trials: Iterable[optuna.Trial | FrozenTrial]) -> None:
    """Let this driver or another driver continue running trials later."""
    for trial in trials:
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
