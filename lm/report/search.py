"""A search as its directory and its study have it: the best trials, and what became of each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import optuna
import sqlalchemy
from optuna.trial import FrozenTrial, TrialState

from lm import run_files
from lm.cli.tables import printable
from lm.errors import UserError, first_line
from lm.report.tables import Table

NUM_BEST = 10  # rows in the table of the best
TEST = "test"  # attribute of a study: which trial was tested, and its perplexity
FAILURES = "failures"  # of a trial: why each of its jobs has failed

optuna.logging.set_verbosity(optuna.logging.WARNING)

_OUTCOMES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


class FoundSearch(NamedTuple):
    """A search that may still go on."""

    directory: str
    settings: Mapping[str, Any]  # as search.json has them
    study: optuna.Study

    @property
    def title(self) -> str:
        """How a report calls it."""
        return printable(f"Search {self.directory.rstrip('/')}")


def storage_url(directory: str, storage: Optional[str]) -> str:
    """Return the address of a search's study: `--storage`, or a SQLite file in its directory."""
    path = os.path.join(directory, run_files.STUDY)
    return storage or sqlalchemy.URL.create("sqlite", database=path).render_as_string()


def load_search(directory: str) -> FoundSearch:
    """Read a search, also while it runs.

    Raises:
      UserError: Its file is damaged, or its storage cannot be read.
    """
    path = os.path.join(directory, run_files.SEARCH)
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
        storage, file = settings["options"]["storage"], os.path.join(directory, run_files.STUDY)
        if not storage and not os.path.exists(file):
            raise UserError(f"{file} does not exist: no trial has begun")  # SQLite would make it
        url, name = storage_url(directory, storage), settings["study"]
        if name not in optuna.get_all_study_names(url):
            raise UserError(f"{url} does not have the study {name}: no trial has begun")
        return FoundSearch(directory, settings, optuna.load_study(study_name=name, storage=url))
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} or the study that it names is damaged: {error!r}") from error
    except Exception as error:  # SQLAlchemy's, or that of the database's driver
        line = first_line(error.__cause__ or error)
        raise UserError(f"the study of {directory} cannot be read: {line}") from error


def best_trials(study: optuna.Study, count: int = NUM_BEST) -> list[FrozenTrial]:
    """Return the finished trials with the lowest validation perplexity, the best first."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(finished, key=lambda trial: trial.value)[:count]


def progress_line(study: optuna.Study, number: int, num_trials: int) -> str:
    """Say what has become of a trial that has just ended."""
    trials = study.get_trials(deepcopy=False)
    trial, best = trials[number], best_trials(study, 1)
    line = f"trial {number} {_OUTCOMES[trial.state]}"
    if trial.state == TrialState.FAIL:
        line += f": {_reason(trial)}"
    elif trial.value is not None:
        best_of = "best of" if trial.state == TrialState.COMPLETE else "after"
        line += f": valid perplexity {trial.value:.2f}, {best_of} {trial.last_step} epoch(s)"
    done = sum(each.state.is_finished() for each in trials)
    best_text = f"; best: trial {best[0].number}, {best[0].value:.2f}" if best else ""
    values = ", ".join(f"{name} {_short(value)}" for name, value in trial.params.items())
    return f"{line} ({values}){best_text}; {done} of {num_trials} done"


def search_text(search: FoundSearch) -> str:
    """Return the report of a search for the console."""
    tables = [table.text for table in search_tables(search)]
    return "\n".join([search.title, "", *summary(search), "", *tables])


def search_tables(search: FoundSearch) -> list[Table]:
    """Return the tables of a report: the best trials, then all."""
    trials = search.study.get_trials(deepcopy=False)
    names = _names(trials)
    rows = [
        [str(trial.number), _OUTCOMES[trial.state], _number(trial), _epochs(trial),
         *_values(trial, names), _reason(trial)]
        for trial in trials
    ]  # fmt: skip
    everything = Table(
        "All trials",
        "The perplexity of a pruned trial is its last. Each trial's run is in the directory"
        f" {run_files.TRIALS}, by its number, and can be continued from there.",
        ["trial", "outcome", "valid", "epochs", *names, "why it failed"],
        rows,
    )
    return [best_table(search.study), everything]


def summary(search: FoundSearch) -> list[str]:
    """Return what a reader wants to know first, in lines."""
    trials = search.study.get_trials(deepcopy=False)
    options = search.settings["options"]
    counts = [
        f"{sum(trial.state == state for trial in trials)} {name}"
        for state, name in _OUTCOMES.items()
        if any(trial.state == state for trial in trials)
    ]
    lines = [
        f"{len(trials)} of {options['trials']} trials: {', '.join(counts)}.",
        f"Sampler {options['sampler']}, pruner {options['pruner']}, {options['ranks_per_trial']}"
        " rank(s) per trial.",
    ]
    for best in best_trials(search.study, 1):
        lines.append(f"Best: trial {best.number}, valid perplexity {best.value:.2f}.")
    tested = search.study.user_attrs.get(TEST)
    if tested:
        lines.append(f"Test perplexity of trial {tested['trial']}: {tested['perplexity']:.2f}.")
    return lines


def best_table(study: optuna.Study) -> Table:
    """Return the table of the best trials."""
    trials = best_trials(study)
    names = _names(trials)
    rows = [
        [str(trial.number), _number(trial), _epochs(trial), *_values(trial, names)]
        for trial in trials
    ]
    return Table(
        "Best trials",
        "By the best validation perplexity of their epochs.",
        ["trial", "valid", "epochs", *names],
        rows,
    )


def _names(trials: Sequence[FrozenTrial]) -> list[str]:
    return list(dict.fromkeys(name for trial in trials for name in trial.params))


def _values(trial: FrozenTrial, names: Sequence[str]) -> list[str]:
    return [_short(trial.params.get(name, "-")) for name in names]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(trial: FrozenTrial) -> str:
    return "-" if trial.value is None else f"{trial.value:.2f}"


def _epochs(trial: FrozenTrial) -> str:
    return str(trial.last_step or 0)


def _reason(trial: FrozenTrial) -> str:
    failures = trial.user_attrs.get(FAILURES, [])
    return failures[-1] if failures and trial.state == TrialState.FAIL else ""
