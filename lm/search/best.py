"""The best trial: its config file `best.py`, and its test at the end of the search."""

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

import optuna
from optuna.trial import FrozenTrial

from lm import run_files
from lm.errors import RunError
from lm.files import write_atomically
from lm.search.places import environment
from lm.search.prepare import Search
from lm.search.results import TEST
from lm.search.study import CONFIG, RUN, best_runs
from lm.search.trial import flag, last_error, launch

logger = logging.getLogger("lm")

_TICK_SECONDS = 0.5
_ESCAPED = "backslashreplace"  # equivalent inside the string literals of best.py

_TITLE = """Trial {number} of the search {study}: validation perplexity {value:.2f}.

{command}
"""
# Appended to the config file of the search.
_BEST = '''

"""{title}"""

_original_config = get_config()


def get_config():
    """Return the best config of the search."""
    return type(_original_config)(
{fields}
    )
'''


def write_best(trial: FrozenTrial, search: Search, directory: str) -> None:
    """Write best.py, a self-contained config file that reproduces the run of a trial."""
    path = os.path.join(directory, run_files.BEST)
    fields = "\n".join(
        f"        {name}={value!r}," for name, value in trial.user_attrs[CONFIG].items()
    )
    options = [flag(name, value) for name, value in search.settings.run.items()]
    command = shlex.join(["python", "-m", "lm.train", "--config", path, *options])
    title = _TITLE.format(
        number=trial.user_attrs[RUN],
        study=search.settings.study,
        value=trial.value,
        command=command.replace("\\", "\\\\").replace('"', '\\"'),  # it is inside a string literal
    )
    with open(search.file.path, "rb") as file:
        content = file.read()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    if encoding == "utf-8-sig":  # only the start of a file may have this mark
        encoding = "utf-8"
    content += _BEST.format(title=title, fields=fields).encode(encoding, _ESCAPED)
    write_atomically(path, content)


def report_best(
    study: optuna.Study, search: Search, directory: str, raise_if_stopped: Callable[[], None]
) -> None:
    """Test the best trial, which is the only one that uses the test split.

    Args:
      study: The study of the search. No other driver may change it meanwhile.
      search: The search.
      directory: The search directory.
      raise_if_stopped: Raises an exception if a signal has asked this process to stop.

    Raises:
      RunError: If no trial has finished, or if the test fails.
    """
    trials = best_runs(study, 1)
    if not trials:
        raise RunError(
            f"no trial has finished; python -m lm.report {shlex.quote(directory)} shows the reasons"
        )
    best, number = trials[0], trials[0].user_attrs[RUN]
    write_best(best, search, directory)  # the driver that found it may have been killed
    tested = study.user_attrs.get(TEST, {})
    if tested.get("trial") != number:
        run_dir = run_files.trial_dir(directory, number)
        tested = {"trial": number, "perplexity": _test(run_dir, search, raise_if_stopped)}
        study.set_user_attr(TEST, tested)
    logger.info(
        "best: trial %d, valid perplexity %.2f, test perplexity %.2f; its config: %s",
        number, best.value, tested["perplexity"], os.path.join(directory, run_files.BEST),
    )  # fmt: skip


def _test(run_dir: str, search: Search, raise_if_stopped: Callable[[], None]) -> float:
    command = [
        sys.executable, "-m", "lm.evaluate", "--run", run_dir, "--split", "test",
        "--checkpoint", "best", "--json",
    ]  # fmt: skip
    if "data_path" in search.settings.run:
        command += ["--data_path", search.settings.run["data_path"]]
    if search.file.functions.sha256:
        command += ["--config", search.file.path]
    logger.info("testing the best trial")
    output = None
    with launch(command, environment(), subprocess.PIPE) as process:
        try:
            while output is None:
                raise_if_stopped()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    output, errors = process.communicate(timeout=_TICK_SECONDS)
        finally:
            process.kill()  # no effect if the process has ended
    if process.returncode:
        reason = last_error(errors) or f"exit code {process.returncode}"
        raise RunError(f"cannot test the best trial: {reason}")
    # A config file may print other lines.
    lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith("{")]
    return json.loads(lines[-1])["perplexity"]
