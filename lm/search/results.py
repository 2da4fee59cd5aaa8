"""The results of a search: the config file of the best trial, a table, and the HTML page."""

import ast
import dataclasses
import os
import pathlib
import shlex
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from lm.cli.tables import epochs_text
from lm.config import RunOptions
from lm.errors import printable
from lm.files import write_atomically
from lm.report import page
from lm.report.comparison import Group, read_run
from lm.report.tables import Table
from lm.search.options import (
    BEST_FILE,
    TRIALS_DIR,
    SearchOptions,
    as_flags,
    load_settings,
    trial_dir,
)
from lm.search.study import CONFIG, EPOCHS, FAILURE, Search, best_trials

_MAX_CURVES = 6  # more curves would be hard to distinguish

# The order of the table.
_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
    TrialState.FAIL: "failed",
}

_DOCSTRING = b'"""The best config of a search. It is defined at the end of this file."""\n'

# Appended to the config file of the search. The text is ASCII, which all encodings contain. The
# values are literals, and the command is printable, so that they cannot become code.
_BEST = '''

# Trial {number:d} of the search: validation perplexity {value:.2f}.
# {command}
_original_config = get_config()


def get_config():
    """Return the best config of the search."""
    return type(_original_config)(**{{
{fields}
    }})
'''


def write_best(search: Search) -> str:
    """Write best.py, a self-contained config file that reproduces the best trial; return its path.

    The file is not written before a trial has finished.
    """
    path = os.path.join(search.directory, BEST_FILE)
    for best in best_trials(search.study)[:1]:
        options = search.settings.given(RunOptions)
        options.pop("max_steps", None)  # limits only the trials
        command = ["python", "-m", "lm.train", "--config", path, *as_flags(options)]
        values = best.user_attrs[CONFIG].items()
        text = _BEST.format(
            number=best.number,
            value=best.value,
            command="".join(c if c.isprintable() else ascii(c)[1:-1] for c in shlex.join(command)),
            fields="\n".join(f"        {name!a}: {value!a}," for name, value in values),
        )
        source = _with_docstring(pathlib.Path(search.file.path).read_bytes())
        write_atomically(path, source + text.encode("ascii", "backslashreplace"))
    return path


def _with_docstring(source: bytes) -> bytes:
    """Replace the docstring of a config file, which describes a different config."""
    tree = ast.parse(source)
    if ast.get_docstring(tree) is None or tree.body[0].end_lineno == tree.body[1].lineno:
        return source
    first = tree.body[0]
    lines = source.splitlines(keepends=True)
    return b"".join([*lines[: first.lineno - 1], _DOCSTRING, *lines[first.end_lineno :]])


def progress_line(trial: FrozenTrial) -> str:
    line = f"trial {trial.number} {_STATES[trial.state]} after {_epochs(trial)} epochs"
    result = trial.user_attrs.get(FAILURE) or f"valid perplexity {_perplexity(trial)}"
    values = ", ".join(f"{name} {_short(value)}" for name, value in trial.params.items())
    return f"{line}: {result} ({values})"


def _epochs(trial: FrozenTrial) -> str:
    return epochs_text(trial.user_attrs.get(EPOCHS, trial.last_step or 0))


def _perplexity(trial: FrozenTrial) -> str:
    return "-" if trial.value is None else f"{trial.value:.2f}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def search_text(directory: str, study: optuna.Study) -> str:
    """Return the report of a search for the console: progress, the best trial, and a table.

    The search may be running.
    """
    planned = SearchOptions(**load_settings(directory).given(SearchOptions)).trials
    states = [trial.state for trial in study.get_trials(deepcopy=False)]
    counts = [f"{states.count(state)} {name}" for state, name in _STATES.items() if state in states]
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
        values = (_short(trial.params.get(name, "-")) for name in names)
        rows.append([
            str(trial.number), _STATES[trial.state], _perplexity(trial),
            _epochs(trial), *values, trial.user_attrs.get(FAILURE, ""),
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
