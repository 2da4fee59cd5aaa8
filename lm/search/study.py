"""The study of a search: check the settings, open the study, and record trials in it.

If a trial is interrupted, its state becomes WAITING again, and a driver continues its run.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import sqlite3
import uuid
import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import optuna
import sqlalchemy
from optuna import pruners, samplers
from optuna.trial import FrozenTrial, TrialState

from lm import logger
from lm.cli.parser import Arguments
from lm.config import Config, RunOptions
from lm.config_file import ConfigFile
from lm.data.corpus import load_corpus_to_train
from lm.errors import RunError, UserError, error_class, first_line
from lm.files import locked, write_atomically
from lm.json_files import write_json
from lm.options import replaced
from lm.record import LOCK_FILE, run_of_checkpoint
from lm.search.settings import (
    CONFIG_COPY,
    SEARCH_FILE,
    STUDY_FILE,
    SearchDirectory,
    SearchOptions,
    Settings,
    load_settings,
)
from lm.search.slots import TrialSlots, divide_hosts
from lm.search.space import Space, choose_config, combinations, parse_space
from lm.tokens.selection import with_absolute_paths

# User attributes of a trial.
EPOCHS = "epochs"  # how long it has trained
FAILURE = "failure"  # why the trial failed

# Trials that differ in these fields cannot be compared before they end.
_UNFAIR_TO_PRUNE = {"seed", "lr_schedule", "num_epochs", "num_steps_total"}

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", module="optuna")  # a resumed trial reports its epochs again
warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


class Search(NamedTuple):
    """A search that is ready to run."""

    directory: str
    settings: Settings
    options: SearchOptions
    file: ConfigFile
    config: Config  # the common config of all trials
    space: Space
    slots: list[TrialSlots]
    study: optuna.Study | None = None

    def config_of(self, trial: optuna.Trial) -> Config:
        """Return the config of a trial, or raise UserError if its values are invalid.

        The sampler chooses the values of a new trial. An interrupted trial keeps its values.
        """
        self.study.sampler = _sampler(trial.number, self.options, self.space)
        return choose_config(self.space, trial, self.config)


def open_search(arguments: Arguments, settings: Settings, stack: contextlib.ExitStack) -> Search:
    """Check a parsed search, and create its directory and its study, or open them.

    If an input is invalid, the directory stays unchanged. The stack unlocks the directory.
    """
    search = _check(arguments, settings)
    if run_of_checkpoint(search.directory):
        raise UserError(
            f"output_dir {search.directory} is a run, or inside a run: choose a different directory"
        )
    is_new = not search.settings.corpus
    # All trials would fail if the corpus were missing.
    try:
        corpus = load_corpus_to_train(search.config, arguments[RunOptions]).record.sha256
    except UserError as error:  # If a search is restarted, the disk may be mounted later.
        raise (UserError if is_new else RunError)(str(error)) from error
    if search.settings.corpus not in ("", corpus):
        raise UserError(
            "cannot resume: the corpus is not the corpus of this search. Give its directory"
            " with --data_path, or start a new search"
        )
    search = search._replace(settings=dataclasses.replace(search.settings, corpus=corpus))
    try:
        os.makedirs(search.directory, exist_ok=True)
        stack.enter_context(locked(os.path.join(search.directory, LOCK_FILE)))
    except BlockingIOError:
        raise RunError(f"another driver is running the search in {search.directory}") from None
    except OSError as error:
        raise error_class(error)(
            f"cannot write to output_dir {search.directory}: {error.strerror}"
        ) from error
    if is_new and load_settings(search.directory):
        raise RunError(f"another driver has started {search.directory}; continue it with --resume")
    with storage_errors(f"the search in {search.directory} is unchanged"):
        return _open(search)


def _check(arguments: Arguments, settings: Settings) -> Search:
    """Return the search after all checks that need no study."""
    options, config = arguments[SearchOptions], with_absolute_paths(arguments[Config])
    space = parse_space(options.space, config)
    is_new = not settings.corpus
    # Otherwise, some trials may use them. A resumed search has the flags of search.json.
    if is_new and space.keys().isdisjoint({"optimizer", "lr_schedule"}):
        config.check_used({*space, *arguments.given[Config]}, arguments.config_file.config)
    for name in space.keys() & arguments.given[Config].keys():
        raise UserError(f"--{name} is in --space too; remove one of them")
    unfair = [name for name in space if name in _UNFAIR_TO_PRUNE]
    if is_new and unfair and options.pruner != "none":
        logger.warning(
            "--space varies %s: add --pruner none, because pruning keeps only the better seeds and"
            " the schedules that are better in early epochs",
            ", ".join(unfair),
        )
    if options.sampler == "grid":
        options = replaced(options, trials=len(combinations(space, options.trials)))
        total = math.prod(len(choices.choices) for choices in space.values())
        if total > options.trials:
            logger.warning(
                "the grid has %d combinations: --trials tries only the first %d",
                total,
                options.trials,
            )
        settings = dataclasses.replace(settings, flags={**settings.flags, "trials": options.trials})
    slots = divide_hosts(options.ranks_per_trial, options.parallel_trials, options.hosts)
    directory = arguments[SearchDirectory].output_dir
    return Search(directory, settings, options, arguments.config_file, config, space, slots)


def _open(search: Search) -> Search:
    """Create or load the study of a search whose directory is locked."""
    copy = os.path.join(search.directory, CONFIG_COPY)
    settings_file = os.path.join(search.directory, SEARCH_FILE)
    settings = search.settings
    if os.path.exists(settings_file):
        study = load_study(search.directory)
    else:  # the user may change or delete the original config file
        write_atomically(copy, pathlib.Path(search.file.path).read_bytes())
        search.file.loaded.copy_to(search.directory)
        settings = dataclasses.replace(settings, study=f"search-{uuid.uuid4()}")
        # The file may contain the study of a driver that was killed here, which stays unused.
        study = optuna.create_study(storage=_storage(search.directory), study_name=settings.study)
    study.pruner = _pruner(search.options, search.config)
    # The previous driver may have been killed.
    interrupt(study, study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
    # Write this file last, because it marks the directory as a search.
    saved = settings.without_secrets()
    for name in sorted(settings.flags.keys() - saved.flags.keys()):
        logger.warning("%s may contain a secret and is not saved: pass it again to resume", name)
    write_json(settings_file, dataclasses.asdict(saved))
    file = dataclasses.replace(search.file, path=copy)
    return search._replace(settings=settings, file=file, study=study)


def load_study(directory: str) -> optuna.Study:
    path = os.path.join(directory, STUDY_FILE)
    what_to_do = "restore it, or start a new search"
    if not os.path.exists(path):  # SQLite would create the file
        raise UserError(f"{path} does not exist; {what_to_do}")
    try:
        return optuna.load_study(
            storage=_storage(directory), study_name=load_settings(directory).study
        )
    except (KeyError, UnicodeEncodeError):  # SQLite has no names with surrogates
        raise UserError(f"{path} is the study of a different search; {what_to_do}") from None


def _storage(directory: str) -> optuna.storages.RDBStorage:
    path = os.path.join(directory, STUDY_FILE)
    # In a URL, some characters of the path would have a meaning.
    engine = {"creator": lambda: sqlite3.connect(path), "poolclass": sqlalchemy.QueuePool}
    return optuna.storages.RDBStorage("sqlite://", engine)


def _sampler(number: int, options: SearchOptions, space: Space) -> samplers.BaseSampler:
    """Return the sampler of a trial.

    Each trial has its own seed, so that a resumed search chooses the same values. A sum of both
    numbers would give trials of different searches the same seed.
    """
    seed = zlib.crc32(f"{options.search_seed} {number}".encode())
    if options.sampler == "grid":
        values = combinations(space, number + 1)[-1]
        return samplers.PartialFixedSampler(values, samplers.RandomSampler())
    if options.sampler == "tpe":
        # Running trials count as bad, so that the next trial tries different values.
        return samplers.TPESampler(seed=seed, constant_liar=True)
    return samplers.RandomSampler(seed=seed)


def _pruner(options: SearchOptions, config: Config) -> pruners.BasePruner:
    if options.pruner == "median":
        # A short search would end before Optuna's default of five trials have finished.
        return pruners.MedianPruner(min(5, options.trials // 4))
    if options.pruner == "hyperband":
        # The number of epochs in num_steps_total depends on batch_size, which trials may vary.
        epochs = "auto" if config.num_steps_total else config.num_epochs
        return pruners.HyperbandPruner(max_resource=epochs)
    return pruners.NopPruner()


def count_unfinished(study: optuna.Study, num_trials: int) -> int:
    """Return the number of trials that are running, interrupted or not created yet."""
    states = [trial.state for trial in study.get_trials(deepcopy=False)]
    return max(num_trials, len(states)) - sum(state.is_finished() for state in states)


def best_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the finished trials, in the order of their validation perplexities."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(finished, key=lambda trial: trial.value)


def interrupt(study: optuna.Study, trials: Iterable[optuna.Trial | FrozenTrial]) -> None:
    """Let this driver or the next driver continue running trials later."""
    for trial in trials:
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)


@contextlib.contextmanager
def storage_errors(what_to_do: str) -> Iterator[None]:
    """Turn the errors of a lost or full disk into one line."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise RunError(f"{where}{error.strerror or error}; {what_to_do}") from error
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        cause = error.__cause__ or error
        line = first_line(getattr(cause, "orig", None) or cause)
        raise RunError(f"cannot use the study ({line}); {what_to_do}") from error
