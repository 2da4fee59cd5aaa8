"""The results of a search: tables, the HTML page, and the config file of the best trial."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState

from lm.cli.tables import printable
from lm.errors import UserError
from lm.files import write_atomically
from lm.report import page
from lm.report.comparison import read_run
from lm.report.tables import Table
from lm.search.options import BEST_FILE, STUDY_FILE, TRIALS_DIR, Settings, load_settings, trial_dir
from lm.search.study import (
    CONFIG,
    FAILURE,
    RUN,
    Search,
    best_runs,
    load_study,
    runs,
    storage_errors,
    storage_url,
)
from lm.search.trial import flag

TEST = "test"  # user attribute of the study: the tested run and its perplexity
_NUM_BEST = 10  # rows in the table of the best trials
_MAX_CURVES = 6  # more curves would be hard to distinguish

_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}

# Appended to the config file of the search. The text is ASCII, which all encodings contain.
_BEST = '''

# Trial {number} of the search {study}: validation perplexity {value:.2f}.
# {command}
_original_config = get_config()


def get_config():
    """Return the best config of the search."""
    return type(_original_config)(
{fields}
    )
'''


class FoundSearch(NamedTuple):
    """A search that may still be running."""

    directory: str
    settings: Settings
    study: optuna.Study

    @property
    def title(self) -> str:
        """The title of a report."""
        return printable(f"Search {self.directory.rstrip('/')}")


def load_search(directory: str) -> FoundSearch:
    """Read a search, which may be running."""
    settings = load_settings(directory)
    file = os.path.join(directory, STUDY_FILE)
    if not settings.options.storage and not os.path.exists(file):  # SQLite would create it
        raise UserError(f"{file} does not exist; no trial has started")
    url = storage_url(directory, settings.options.storage)
    with storage_errors(f"cannot report {directory}"):
        return FoundSearch(directory, settings, load_study(settings.study, url))


def write_best(search: Search, trial: FrozenTrial) -> str:
    """Write best.py, a self-contained config file that reproduces a trial; return its path."""
    path = os.path.join(search.directory, BEST_FILE)
    options = [flag(name, value) for name, value in search.settings.run.items()]
    values = trial.user_attrs[CONFIG].items()
    text = _BEST.format(
        number=trial.user_attrs[RUN],
        study=search.settings.study,
        value=trial.value,
        command=shlex.join(["python", "-m", "lm.train", "--config", path, *options]),
        fields="\n".join(f"        {name}={value!a}," for name, value in values),
    )
    with open(search.file.path, "rb") as file:
        write_atomically(path, file.read() + text.encode("ascii", "backslashreplace"))
    return path


def progress_line(study: optuna.Study, trial: FrozenTrial, num_runs: int) -> str:
    """Return the log line of a finished trial."""
    line = f"trial {trial.user_attrs[RUN]} {_STATES[trial.state]}"
    if trial.state == TrialState.FAIL:
        line += f": {trial.user_attrs[FAILURE]}"
    elif trial.value is not None:
        best_of = "best of" if trial.state == TrialState.COMPLETE else "after"
        line += f": valid perplexity {trial.value:.2f}, {best_of} {trial.last_step} epoch(s)"
    values = ", ".join(f"{name} {_short(value)}" for name, value in trial.params.items())
    best = "".join(
        f"; best: trial {each.user_attrs[RUN]}, {each.value:.2f}" for each in best_runs(study, 1)
    )
    num_done = sum(each.state.is_finished() for each in runs(study))
    return f"{line} ({values}){best}; {num_done} of {num_runs} done"


def search_text(search: FoundSearch) -> str:
    """Return the report of a search for the console."""
    tables = [best_table(search.study).text, all_table(search.study).text]
    return "\n".join([search.title, "", *summary(search), "", *tables])


def best_table(study: optuna.Study) -> Table:
    """Return the table of the best trials."""
    note = "By the best validation perplexity of their epochs."
    return _table("Best trials", note, best_runs(study, _NUM_BEST))


def all_table(study: optuna.Study) -> Table:
    """Return the table of all trials."""
    note = (
        "The perplexity of a pruned trial is its last perplexity. The run of each trial is in the"
        f" directory {TRIALS_DIR}, and can be continued there."
    )
    return _table("All trials", note, runs(study))


def _table(title: str, note: str, trials: Sequence[FrozenTrial]) -> Table:
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    rows = []
    for trial in trials:
        perplexity = "-" if trial.value is None else f"{trial.value:.2f}"
        values = (_short(trial.params.get(name, "-")) for name in names)
        rows.append([
            str(trial.user_attrs[RUN]), _STATES[trial.state], perplexity,
            str(trial.last_step or 0), *values, trial.user_attrs.get(FAILURE, ""),
        ])  # fmt: skip
    header = ["trial", "outcome", "valid", "epochs", *names, "reason of the failure"]
    return Table(title, note, header, rows)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary(search: FoundSearch) -> list[str]:
    """Return the first lines of a report: progress, settings, and the best trial."""
    trials, options = runs(search.study), search.settings.options
    states = [trial.state for trial in trials]
    counts = [f"{states.count(state)} {name}" for state, name in _STATES.items() if state in states]
    lines = [
        f"{len(trials)} of {options.trials} trials: {', '.join(counts)}.",
        f"Sampler {options.sampler}, pruner {options.pruner}, {options.ranks_per_trial}"
        " rank(s) per trial.",
    ]
    for best in best_runs(search.study, 1):
        lines.append(f"Best: trial {best.user_attrs[RUN]}, valid perplexity {best.value:.2f}.")
    tested = search.study.user_attrs.get(TEST)
    if tested:
        lines.append(f"Test perplexity of trial {tested['trial']}: {tested['perplexity']:.2f}.")
    return lines


def build_search_page(search: FoundSearch) -> str:
    """Return the report of a search as an HTML page. optuna-dashboard has more plots."""
    from lm.report.curves import draw_curves, rendered  # needs matplotlib

    finished = best_runs(search.study, _MAX_CURVES)
    parts = [*map(page.line_html, summary(search)), page.table_html(best_table(search.study))]
    if len(finished) > 1:  # otherwise, the plots would be empty
        parts += _plots(search.study)
    if finished:
        numbers = [trial.user_attrs[RUN] for trial in finished]
        curves = [read_run(trial_dir(search.directory, number)) for number in numbers]
        labels = [f"trial {number:04d}" for number in numbers]
        png = rendered(draw_curves(curves, labels, title=""), "png")
        parts.append(page.image_html("Learning curves of the best trials", png))
    parts.append(page.details_html("Settings of the search", search.settings._asdict()))
    return page.page_html(search.title, [*parts, page.table_html(all_table(search.study))])


def _plots(study: optuna.Study) -> list[str]:
    import matplotlib

    matplotlib.use("Agg")  # the hosts of clusters have no display
    import optuna.visualization.matplotlib as plots
    from matplotlib import pyplot

    from lm.report.curves import rendered

    found = []
    with warnings.catch_warnings(), matplotlib.rc_context():  # the plots change global styles
        warnings.simplefilter("ignore")  # the plots are experimental
        for title, plot in {
            "Optimization history": plots.plot_optimization_history,
            "Parallel coordinates": plots.plot_parallel_coordinate,
        }.items():
            figure = plot(study, target_name="valid perplexity").figure
            figure.set_size_inches(10, 5)
            found.append(page.image_html(title, rendered(figure, "png", bbox_inches="tight")))
            pyplot.close(figure)
    return found
