"""The results of a search, from its directory and its study, for the console and for a report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState

from lm import run_files
from lm.cli.tables import printable
from lm.errors import UserError
from lm.report.tables import Table
from lm.search.study import FAILURE, RUN, best_runs, runs, storage_errors, storage_url

NUM_BEST = 10  # rows in the table of the best trials
TEST = "test"  # user attribute of the study: the tested run and its perplexity

_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


class FoundSearch(NamedTuple):
    """A search that may still be running."""

    directory: str
    settings: Mapping[str, Any]  # the content of search.json
    study: optuna.Study

    @property
    def title(self) -> str:
        """The title of a report."""
        return printable(f"Search {self.directory.rstrip('/')}")


def load_search(directory: str) -> FoundSearch:
    """Read a search, which may be running.

    Raises:
      UserError: If search.json is corrupt, or if the study does not exist.
      RunError: If the storage cannot be read.
    """
    path = os.path.join(directory, run_files.SEARCH)
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
        storage, name = settings["options"]["storage"], settings["study"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is corrupt: {error!r}") from error
    file = os.path.join(directory, run_files.STUDY)
    if not storage and not os.path.exists(file):  # SQLite would create it
        raise UserError(f"{file} does not exist; no trial has started")
    url = storage_url(directory, storage)
    with storage_errors(f"cannot report {directory}"):
        if name not in optuna.get_all_study_names(url):
            raise UserError(f"{url} does not contain the study {name}; no trial has started")
        return FoundSearch(directory, settings, optuna.load_study(study_name=name, storage=url))


def progress_line(study: optuna.Study, trial: FrozenTrial, num_runs: int) -> str:
    """Return the log line of a finished trial."""
    line = f"trial {trial.user_attrs[RUN]} {_STATES[trial.state]}"
    if trial.state == TrialState.FAIL:
        line += f": {trial.user_attrs[FAILURE]}"
    elif trial.value is not None:
        best_of = "best of" if trial.state == TrialState.COMPLETE else "after"
        line += f": valid perplexity {trial.value:.2f}, {best_of} {trial.last_step} epoch(s)"
    values = ", ".join(f"{name} {_short(value)}" for name, value in trial.params.items())
    num_done = sum(each.state.is_finished() for each in runs(study))
    best = "".join(
        f"; best: trial {each.user_attrs[RUN]}, {each.value:.2f}" for each in best_runs(study, 1)
    )
    return f"{line} ({values}){best}; {num_done} of {num_runs} done"


def search_text(search: FoundSearch) -> str:
    """Return the report of a search for the console."""
    tables = [table.text for table in search_tables(search)]
    return "\n".join([search.title, "", *summary(search), "", *tables])


def search_tables(search: FoundSearch) -> list[Table]:
    """Return the tables of a report: the best trials, then all trials."""
    trials = runs(search.study)
    names = _value_names(trials)
    rows = [
        [str(trial.user_attrs[RUN]), _STATES[trial.state], *_result(trial), *_values(trial, names),
         trial.user_attrs.get(FAILURE, "") if trial.state == TrialState.FAIL else ""]
        for trial in trials
    ]  # fmt: skip
    all_trials = Table(
        "All trials",
        "The perplexity of a pruned trial is its last one. The run of each trial is in the"
        f" directory {run_files.TRIALS}, and can be continued there.",
        ["trial", "outcome", "valid", "epochs", *names, "reason of the failure"],
        rows,
    )
    return [best_table(search.study), all_trials]


def best_table(study: optuna.Study) -> Table:
    """Return the table of the best trials."""
    trials = best_runs(study, NUM_BEST)
    names = _value_names(trials)
    return Table(
        "Best trials",
        "By the best validation perplexity of their epochs.",
        ["trial", "valid", "epochs", *names],
        [[str(trial.user_attrs[RUN]), *_result(trial), *_values(trial, names)] for trial in trials],
    )


def summary(search: FoundSearch) -> list[str]:
    """Return the first lines of a report: progress, settings, and the best trial."""
    trials, options = runs(search.study), search.settings["options"]
    states = [trial.state for trial in trials]
    counts = [f"{states.count(state)} {name}" for state, name in _STATES.items() if state in states]
    lines = [
        f"{len(trials)} of {options['trials']} trials: {', '.join(counts)}.",
        f"Sampler {options['sampler']}, pruner {options['pruner']}, {options['ranks_per_trial']}"
        " rank(s) per trial.",
    ]
    for best in best_runs(search.study, 1):
        lines.append(f"Best: trial {best.user_attrs[RUN]}, valid perplexity {best.value:.2f}.")
    tested = search.study.user_attrs.get(TEST)
    if tested:
        lines.append(f"Test perplexity of trial {tested['trial']}: {tested['perplexity']:.2f}.")
    return lines


def _value_names(trials: Sequence[FrozenTrial]) -> list[str]:
    return list(dict.fromkeys(name for trial in trials for name in trial.params))


def _values(trial: FrozenTrial, names: Sequence[str]) -> list[str]:
    return [_short(trial.params.get(name, "-")) for name in names]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _result(trial: FrozenTrial) -> tuple[str, str]:
    """Return the validation perplexity and the number of epochs."""
    return "-" if trial.value is None else f"{trial.value:.2f}", str(trial.last_step or 0)
