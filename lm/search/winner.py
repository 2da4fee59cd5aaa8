"""The best trial: its config as a file, and its test at the end of the search."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Callable

from optuna.trial import FrozenTrial

from lm import run_files
from lm.errors import RunError
from lm.files import write_atomically
from lm.report.search import TEST, best_trials
from lm.search.job import flag, launch, reason_in
from lm.search.places import environment
from lm.search.prepare import Prepared
from lm.search.study import Study

logger = logging.getLogger("lm")

_TICK_SECONDS = 0.5
_ESCAPED = "backslashreplace"  # within Python's strings they are the same characters

_TITLE = """Trial {number} of the search {study}: validation perplexity {value:.2f}.

{command}
"""
_BEST = '''"""{title}"""

from lm.config import Config


def get_config() -> Config:
    """Return the best config that the search has found."""
    return Config(
{fields}
    )
'''
# Where the config file has a network or a class of its own: that file, and this after it.
_BEST_OF_FILE = '''

"""{title}"""

_begun_with = get_config()


def get_config():
    """Return the best config that the search has found."""
    return type(_begun_with)(
{fields}
    )
'''


def write_best(trial: FrozenTrial, search: Prepared, directory: str) -> None:
    """Write best.py, a config file that stands alone and gives this trial's run again."""
    path = os.path.join(directory, run_files.BEST)
    config: dict = trial.user_attrs["config"]
    fields = "\n".join(f"        {name}={value!r}," for name, value in config.items())
    options = [flag(name, value) for name, value in search.settings.run.items()]
    command = shlex.join(["python", "-m", "lm.train", "--config", path, *options])
    title = _TITLE.format(
        number=trial.number,
        study=search.settings.study,
        value=trial.value,
        # Within a string of Python's.
        command=command.replace("\\", "\\\\").replace('"', '\\"'),
    )
    if search.file.functions.sha256:
        with open(search.file.path, "rb") as file:
            content = file.read()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        if encoding == "utf-8-sig":  # its mark is at the start of a file alone
            encoding = "utf-8"
        content += _BEST_OF_FILE.format(title=title, fields=fields).encode(encoding, _ESCAPED)
    else:
        content = _BEST.format(title=title, fields=fields).encode("utf-8", _ESCAPED)
    write_atomically(path, content)


def report_winner(
    study: Study, search: Prepared, directory: str, stop_if_asked: Callable[[], None]
) -> None:
    """Test the best trial, the only one that ever sees the test split, and say how to train it.

    Args:
      study: Its trials.
      search: What was tried.
      directory: Of the search.
      stop_if_asked: Raises what ends the search when a signal has come.

    Raises:
      RunError: No trial has finished, or the test fails.
    """
    best = best_trials(study.optuna, 1)
    if not best:
        raise RunError(
            f"no trial has finished: see why in the output of python -m lm.report {directory}"
        )
    with study.turn():
        write_best(best[0], search, directory)  # the driver that found it may have been killed
        tested = study.optuna.user_attrs.get(TEST, {})
        if tested.get("trial") != best[0].number:
            run_dir = run_files.trial_dir(directory, best[0].number)
            tested = {"trial": best[0].number, "perplexity": _test(run_dir, search, stop_if_asked)}
            study.optuna.set_user_attr(TEST, tested)
    logger.info(
        "best: trial %d, valid perplexity %.2f, test perplexity %.2f; its config: %s",
        best[0].number, best[0].value, tested["perplexity"],
        os.path.join(directory, run_files.BEST),
    )  # fmt: skip


def _test(run_dir: str, search: Prepared, stop_if_asked: Callable[[], None]) -> float:
    command = [
        sys.executable, "-m", "lm.evaluate", "--run", run_dir, "--split", "test",
        "--checkpoint", "best", "--json",
    ]  # fmt: skip
    if "data_path" in search.settings.run:
        command += ["--data_path", search.settings.run["data_path"]]
    if search.file.functions.sha256:
        command += ["--config", search.file.path]
    logger.info("testing the best trial")
    with launch(command, environment(), subprocess.PIPE) as process:
        try:
            output, errors = _communicate(process, stop_if_asked)
        finally:
            process.kill()  # nothing of it is kept, if it has not ended
    if process.returncode:
        reason = reason_in(errors) or f"exit code {process.returncode}"
        raise RunError(f"the best trial could not be tested: {reason}")
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])["perplexity"]  # a config file may have printed others before


def _communicate(process: subprocess.Popen, stop_if_asked: Callable[[], None]) -> list[str]:
    while True:
        stop_if_asked()
        with contextlib.suppress(subprocess.TimeoutExpired):
            said = process.communicate(timeout=_TICK_SECONDS)
            return [text.decode(errors="replace") for text in said]
