"""The results of a search: the config file of the best trial, and a line for each trial."""

import dataclasses
import os
import pathlib
import shlex
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from lm.cli.markdown import epochs_text, perplexity_form
from lm.config import RunOptions
from lm.files import write_atomically
from lm.search.settings import BEST_FILE, Settings, as_flags
from lm.search.study import EPOCHS, FAILURE, Search, best_trials

# In the order of the report.
OUTCOMES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
    TrialState.FAIL: "failed",
}

# Appended to the config file of the search. The text is ASCII, which all encodings contain. The
# values are literals, which cannot become code.
_BEST = '''

# The best config, trial {number:d} of a search: validation perplexity {value}.
_original_config = get_config()


def get_config():
    """Return the best config of the search."""
    return type(_original_config)(**{{
{fields}
    }})
'''


def write_best(search: Search) -> None:
    """Write best.py, a self-contained config file that reproduces the best trial.

    The file is not written before a trial has finished.
    """
    for best in best_trials(search.study)[:1]:
        values = dataclasses.asdict(dataclasses.replace(search.config, **best.params)).items()
        text = _BEST.format(
            number=best.number,
            value=perplexity_of(best),
            fields="\n".join(f"        {name!a}: {value!a}," for name, value in values),
        )
        source = pathlib.Path(search.file.path).read_bytes()
        path = os.path.join(search.directory, BEST_FILE)
        write_atomically(path, source + text.encode("ascii", "backslashreplace"))


def best_command(directory: str, settings: Settings) -> str:
    """Return the command that trains best.py and tests its best checkpoint."""
    options = settings.without_secrets().given(RunOptions)
    options.pop("max_steps", None)  # limits only the trials
    options["test_on"] = "best"
    path = os.path.join(directory, BEST_FILE)
    return shlex.join(["python", "-m", "lm.train", "--config", path, *as_flags(options)])


def progress_line(trial: FrozenTrial) -> str:
    """Return a log line about a trial that has ended."""
    line = f"trial {trial.number} {outcome_of(trial)} after {epochs_of(trial)} epochs"
    result = trial.user_attrs.get(FAILURE) or f"valid perplexity {perplexity_of(trial)}"
    return f"{line}: {result} ({values_text(trial)})"


def outcome_of(trial: FrozenTrial) -> str:
    """Return the outcome of a trial. For Optuna, a failure because of the values is pruned."""
    return "failed" if FAILURE in trial.user_attrs else OUTCOMES[trial.state]


def values_text(trial: FrozenTrial) -> str:
    """Return the names and the values of the hyperparameters of a trial."""
    return ", ".join(f"{name} {short_text(value)}" for name, value in trial.params.items())


def epochs_of(trial: FrozenTrial) -> str:
    """Return the number of epochs that a trial has trained."""
    return epochs_text(trial.user_attrs.get(EPOCHS, trial.last_step or 0))


def perplexity_of(trial: FrozenTrial) -> str:
    """Return the validation perplexity of a trial, or a dash if it failed or has none."""
    if FAILURE in trial.user_attrs or trial.value is None:
        return "-"
    return format(trial.value, perplexity_form(trial.value))


def short_text(value: Any) -> str:
    """Return a value of the search space with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
