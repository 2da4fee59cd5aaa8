"""The report of a search, as text and as an HTML page."""

import dataclasses

import optuna
from optuna.trial import TrialState

from lm.errors import printable
from lm.report import page
from lm.report.comparison import Group, read_run
from lm.report.tables import Table
from lm.search.results import STATES, epochs_of, perplexity_of, short_text
from lm.search.settings import TRIALS_DIR, SearchOptions, load_settings, trial_dir
from lm.search.study import FAILURE, best_trials

_MAX_CURVES = 6  # more curves would be hard to distinguish


def search_text(directory: str, study: optuna.Study) -> str:
    """Return the report of a search for the console: progress, the best trial, and a table.

    The search may be running.
    """
    planned = SearchOptions(**load_settings(directory).given(SearchOptions)).trials
    states = [trial.state for trial in study.get_trials(deepcopy=False)]
    counts = [f"{states.count(state)} {name}" for state, name in STATES.items() if state in states]
    lines = [printable(f"Search {directory.rstrip('/')}"), ""]
    lines.append(f"{len(states)} of {planned} trials: {', '.join(counts)}.")
    for best in best_trials(study)[:1]:
        lines.append(f"Best: trial {best.number}, valid perplexity {best.value:.2f}.")
    return "\n".join([*lines, "", _table(study).text])


def _table(study: optuna.Study) -> Table:
    trials = study.get_trials(deepcopy=False)
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    best_first = best_trials(study)
    best_first += [trial for trial in trials if trial.state != TrialState.COMPLETE]
    rows = []
    for trial in best_first:
        values = (short_text(trial.params.get(name, "-")) for name in names)
        rows.append([
            str(trial.number), STATES[trial.state], perplexity_of(trial),
            epochs_of(trial), *values, trial.user_attrs.get(FAILURE, ""),
        ])  # fmt: skip
    return Table(
        "Trials, best first",
        "The validation perplexity of a finished trial is the best of its epochs, and the"
        " perplexity of a pruned trial is its last. The run of each trial is in the directory"
        f" {TRIALS_DIR}, and can be continued there.",
        ["trial", "outcome", "valid", "epochs", *names, "reason of the failure"],
        rows,
    )


def build_search_page(directory: str, study: optuna.Study) -> str:
    """Return the report of a search as an HTML page. optuna-dashboard has more plots."""
    from lm.report.curves import draw_curves, rendered  # needs matplotlib

    text = search_text(directory, study)
    parts = [page.text_html(text)]
    numbers = [trial.number for trial in best_trials(study)[:_MAX_CURVES]]
    if numbers:
        curves = [
            Group(f"trial {number:04d}", [read_run(trial_dir(directory, number))])
            for number in numbers
        ]
        figure = draw_curves(curves, title="Learning curves of the best trials")
        parts.append(page.image_html(rendered(figure, "png")))
    settings = dataclasses.asdict(load_settings(directory))
    parts.append(page.details_html("Settings of the search", settings))
    return page.page_html(text.partition("\n")[0], parts)
