"""The report of a search, as text and as an HTML page."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import optuna
from optuna import visualization
from optuna.trial import TrialState

from lm.errors import ProgramExit, printable
from lm.report.comparison import group_by_corpus
from lm.report.metrics import RunMetrics, read_run
from lm.report.tables import Table
from lm.search.results import (
    OUTCOMES,
    best_command,
    epochs_of,
    outcome_of,
    perplexity_of,
    short_text,
    values_text,
)
from lm.search.settings import BEST_FILE, TRIALS_DIR, SearchOptions, load_settings, trial_dir
from lm.search.study import FAILURE, best_trials

_MAX_CURVES = 6  # more curves would be hard to distinguish
_MAX_CONTOURS = 4  # parameters; their pairs have a plot each


def search_text(directory: str, study: optuna.Study) -> str:
    """Return the report of a search for the console: progress, the best trial, and a table.

    The search may be running.
    """
    title, *lines = _sentences(directory, study)
    return "\n".join([title, "", *lines, "", _table(study).text])


def _sentences(directory: str, study: optuna.Study) -> list[str]:
    """Return the title of a search, its progress and its best trial."""
    planned = SearchOptions(**load_settings(directory).given(SearchOptions)).trials
    outcomes = [outcome_of(trial) for trial in study.get_trials(deepcopy=False)]
    counts = [f"{outcomes.count(n)} {n}" for n in OUTCOMES.values() if n in outcomes]
    lines = [printable(f"Search {directory.rstrip('/')}")]
    lines.append(f"{len(outcomes)} of {planned} trials: {', '.join(counts)}.")
    for best in best_trials(study)[:1]:
        lines.append(f"Best: trial {best.number}, valid perplexity {perplexity_of(best)}.")
    return lines


def _table(study: optuna.Study) -> Table:
    trials = study.get_trials(deepcopy=False)
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    best_first = best_trials(study)
    best_first += [trial for trial in trials if trial.state != TrialState.COMPLETE]
    rows = []
    for trial in best_first:
        values = (short_text(trial.params.get(name, "-")) for name in names)
        rows.append([
            str(trial.number), outcome_of(trial), perplexity_of(trial),
            epochs_of(trial), *values, trial.user_attrs.get(FAILURE, ""),
        ])  # fmt: skip
    header = ["trial", "outcome", "valid", "epochs", *names, "reason of the failure"]
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return Table(
        "Trials, best first",
        "The validation perplexity of a finished trial is its best, and the perplexity of a pruned"
        " trial is its last at the end of an epoch. The run of each trial is in the directory"
        f" {TRIALS_DIR}, and can be continued there. A finished trial with 0 epochs repeats the"
        " values of an earlier trial and has no run.",
        header,
        rows,
    )


def build_search_page(directory: str, study: optuna.Study) -> bytes:
    """Return the report of a search as an HTML page."""
    from lm.report.page import Part, build_page  # needs the extra
    from lm.report.runs_page import curves_part

    title, *sentences = _sentences(directory, study)
    sections = group_by_corpus(_best_runs(directory, study))
    sentences += [f"Corpus: {section.corpus}" for section in sections]
    settings = load_settings(directory)
    has_best = os.path.exists(os.path.join(directory, BEST_FILE))
    values = {"corpus": settings.corpus, "study": settings.study, **settings.flags}
    rows = [[name, str(value)] for name, value in values.items()]
    parts = [
        Part(
            "Trials",
            sentences,
            code=best_command(directory, settings) if has_best else "",
            tables=[_table(study)],
        ),
        Part("Plots of the search", plots=list(_plots(study))),
        *(curves_part("Best trials", section) for section in sections),
        Part("Settings", folded=[Table("Settings of the search", "", ["name", "value"], rows)]),
    ]
    return build_page(title, parts)


def _best_runs(directory: str, study: optuna.Study) -> list[RunMetrics]:
    """Return the runs of the best trials. Their names contain the values of the search."""
    runs = []
    for trial in best_trials(study):
        if len(runs) == _MAX_CURVES:
            break
        # The trial may repeat another trial, or somebody may have removed the run.
        with contextlib.suppress(ProgramExit):
            run = read_run(trial_dir(directory, trial.number))
            runs.append(run._replace(label=f"trial {trial.number:04d}: {values_text(trial)}"))
    return runs


def _plot_contours(study: optuna.Study, **names: str) -> Any:
    trials = best_trials(study)
    parameters = list(dict.fromkeys(name for trial in trials for name in trial.params))
    return visualization.plot_contour(study, parameters[:_MAX_CONTOURS], **names)


_PLOTS = {
    "History": visualization.plot_optimization_history,
    "Importance of the settings": visualization.plot_param_importances,
    "Parallel coordinates": visualization.plot_parallel_coordinate,
    "Slices": visualization.plot_slice,
    "Contours": _plot_contours,
}


def _plots(study: optuna.Study) -> Iterator[dict[str, Any]]:
    """Yield Optuna's plots. Some need several finished trials, or several parameters."""
    for title, draw in _PLOTS.items():
        with contextlib.suppress(ImportError, RuntimeError, ValueError):
            figure = draw(study, target_name="valid perplexity")
            figure.update_layout(template="none", title=None)
            if figure.data:
                yield {"title": title, "wide": True, **json.loads(figure.to_json())}
