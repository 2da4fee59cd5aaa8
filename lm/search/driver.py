"""The driver: runs the trials of a study in Optuna's loop, one thread for each running trial."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import logging
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from lm.config import Config
from lm.distributed.signals import Signals
from lm.errors import RunError, Stopped, UserError
from lm.files import locked
from lm.record import LOCK_FILE
from lm.search.options import TRIALS_DIR, trial_dir
from lm.search.results import TEST, best_table, progress_line, write_best
from lm.search.space import SuggestError, config_of
from lm.search.study import (
    CONFIG,
    FAILURE,
    RUN,
    Search,
    best_runs,
    requeue,
    runs,
    storage_errors,
)
from lm.search.trial import Outcome, TrialJob, TrialSlots, lost_hosts

logger = logging.getLogger("lm")

_TICK_SECONDS = 0.5
_MAX_JOBS = 3  # a failed trial is retried twice
_MAX_SAME_FAILURES = 3  # while no trial succeeds
_DISK_FULL = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)]
_TABLE_EVERY = 10  # finished trials


class _TrialEnded(Exception):
    """Ends a trial. The run continues later, unless the trial has a FAILURE."""


class Driver:
    """Runs the trials of a study until all are finished."""

    def __init__(self, search: Search, signals: Signals):
        self._search, self._study, self._signals = search, search.study, signals
        self._num_runs = search.settings.options.trials
        self._slots = list(search.slots)  # only slots on hosts that respond
        self._free = list(search.slots)
        self._lock = threading.RLock()  # protects the attributes of this object, and best.py
        self._same_failures: collections.Counter = collections.Counter()  # keys are reasons
        self._error: Exception | None = None  # ends the search
        command = f"python -m lm.search --output_dir {shlex.quote(search.directory)} --resume"
        self._resume = f"resume with: {command}"

    def run(self) -> None:
        """Run trials until the search is complete, and test the best trial.

        Raises:
          Stopped: If a signal has arrived. The running trials are saved.
          RunError: If the storage, the disk or the last host is lost. The running trials are saved.
        """
        directory = os.path.join(self._search.directory, TRIALS_DIR)
        logger.info(
            "searching: %d trials, %d at a time, in %s", self._num_runs, len(self._slots), directory
        )
        with storage_errors(f"the running trials are saved; {self._resume}"):
            while states := self._unfinished():
                num_ready = sum(state != TrialState.RUNNING for state in states)
                if num_ready:
                    self._optimize(num_ready)
                else:  # Other drivers run the last trials. If one dies, this driver takes over.
                    self._tick()
                    optuna.storages.fail_stale_trials(self._study)
            print(best_table(self._study).text)
            with self._turn():
                self._test_best()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Exclude other threads, and other drivers that share the study."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lock)
            if self._search.settings.options.storage:
                path = os.path.join(self._search.directory, LOCK_FILE)
                stack.enter_context(locked(path, "updating the search"))
            yield

    def _unfinished(self) -> list[TrialState]:
        """Return the states of the unfinished runs. Runs without a trial are WAITING."""
        trials = runs(self._study)
        states = [trial.state for trial in trials if not trial.state.is_finished()]
        return states + [TrialState.WAITING] * (self._num_runs - len(trials))

    def _optimize(self, num_trials: int) -> None:
        try:
            self._study.optimize(
                self._objective, n_trials=num_trials, n_jobs=min(num_trials, len(self._slots)),
                catch=(_TrialEnded,), callbacks=[self._after_trial],
            )  # fmt: skip
        except Exception as error:
            if not self._error:
                runs(self._study)  # raises the error of a lost storage, which Optuna may hide
                if not isinstance(error, (ValueError, UpdateFinishedTrialError)):
                    raise
                # This driver was suspended for longer than the grace period.
                logger.warning("another driver took over a trial (%s)", error)
        if self._error:
            raise self._error

    def _objective(self, trial: optuna.Trial) -> float:
        """Train a run to its end and return its best validation perplexity."""
        try:
            return self._train(trial)
        except (_TrialEnded, optuna.TrialPruned):
            raise
        except UpdateFinishedTrialError as error:  # another driver took over
            raise _TrialEnded from error
        except Exception as error:
            # Optuna loses the errors of the threads that end last.
            self._error = self._error or error
            self._study.stop()
            raise _TrialEnded from error

    def _train(self, trial: optuna.Trial) -> float:
        directory = trial_dir(self._search.directory, self._number_of(trial))
        job = TrialJob(directory, self._config_of(trial, directory), self._search, test_on="none")
        num_failures = 0
        while True:
            outcome = self._run_job(job, lambda: self._report(trial, job))
            if outcome.kind == "finished":
                return min(job.perplexities().values())
            if outcome.kind == "stopped":
                raise optuna.TrialPruned
            num_failures += 1
            if outcome.is_user_error or num_failures == _MAX_JOBS:
                self._fail(trial, outcome.reason, directory)
            logger.warning(
                "trial %d failed (%s); retrying, %d of %d",
                trial.user_attrs[RUN], outcome.reason, num_failures, _MAX_JOBS - 1,
            )  # fmt: skip

    def _number_of(self, trial: optuna.Trial) -> int:
        """Return the number of the trial's run. A new run gets the next number."""
        self._check()
        if RUN not in trial.user_attrs:
            with self._turn():
                number = len(runs(self._study))
                if number >= self._num_runs:  # other drivers have started the last runs
                    self._study.stop()
                    raise _TrialEnded
                trial.set_user_attr(RUN, number)
        return trial.user_attrs[RUN]

    def _config_of(self, trial: optuna.Trial, directory: str) -> Config:
        try:
            config = config_of(self._search.space, trial, self._search.config)
        except SuggestError as error:
            self._fail(trial, str(error), directory)
        except UserError as error:  # these values are invalid, but others may be valid
            trial.set_user_attr(FAILURE, str(error))
            raise _TrialEnded from error
        trial.set_user_attr(CONFIG, dataclasses.asdict(config))
        return config

    def _run_job(self, job: TrialJob, after_tick: Callable[[], None]) -> Outcome:
        """Run a job until it ends. If the job loses a host, continue it in different slots.

        Raises:
          RunError: If the disk is full. The next trials would fail too.
        """
        while True:
            slots = self._take_slots()
            try:
                while not job.start(slots):
                    self._tick()
                while job.is_running():
                    self._tick()
                    after_tick()
                after_tick()
                outcome = job.outcome()
                if any(text in outcome.reason for text in _DISK_FULL):
                    raise RunError(
                        f"{job.directory} failed ({outcome.reason}); free some space, then"
                        f" {self._resume}"
                    )
                if outcome.kind != "failed" or outcome.is_user_error:
                    return outcome
                lost = lost_hosts(slots)
                if not lost:
                    return outcome
                logger.warning(
                    "%s no longer responds; %s continues elsewhere (%s)",
                    " and ".join(lost), job.directory, outcome.reason,
                )  # fmt: skip
                self._slots.remove(slots)
            finally:
                job.stop(wait=True)
                if slots in self._slots:
                    self._free.append(slots)

    def _take_slots(self) -> TrialSlots:
        while True:
            with self._lock:
                if self._free:
                    return self._free.pop()
            if not self._slots:
                raise RunError(f"no host is left to run trials on; {self._resume}")
            self._tick()

    def _report(self, trial: optuna.Trial, job: TrialJob) -> None:
        """Report new epochs to the study, and stop the job of a bad trial."""
        perplexities = job.perplexities()
        new = sorted(perplexities.keys() - job.reported)
        for epoch in new:
            trial.report(perplexities[epoch], epoch)  # a second report of an epoch has no effect
        job.reported.update(new)
        if new and new[-1] < job.config.num_epochs and trial.should_prune():
            job.stop()

    def _fail(self, trial: optuna.Trial, reason: str, directory: str) -> NoReturn:
        """Fail a run, or the whole search if its runs fail with the same error."""
        same = reason.replace(directory, "")
        with self._lock:
            self._same_failures[same] += 1
        count = self._same_failures[same]
        if count >= _MAX_SAME_FAILURES:
            raise RunError(
                f"{count} trials failed with the same error: {reason}; fix it, then {self._resume}"
            )
        trial.set_user_attr(FAILURE, reason)
        raise _TrialEnded

    def _tick(self) -> None:
        time.sleep(_TICK_SECONDS)
        self._check()

    def _check(self) -> None:
        """End the current trial if a signal arrived or the search failed."""
        if self._signals.stop:
            raise Stopped(
                f"stopped by {signal.Signals(self._signals.stop).name}. The running trials are"
                f" saved; {self._resume}",
                self._signals.stop,
            )
        if self._error:
            raise _TrialEnded

    def _after_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.state == TrialState.FAIL and FAILURE not in trial.user_attrs:
            if RUN in trial.user_attrs:
                requeue(study, trial)
            return
        with self._lock:
            if trial.state != TrialState.FAIL:
                self._same_failures.clear()
            logger.info("%s", progress_line(study, trial, self._num_runs))
            best = best_runs(study, 1)
            if best and best[0].number == trial.number:
                write_best(self._search, best[0])
            num_finished = sum(each.state.is_finished() for each in runs(study))
            if num_finished % _TABLE_EVERY == 0:
                logger.info("%s", best_table(study).text)

    def _test_best(self) -> None:
        """Test the best trial. No other trial uses the test split."""
        trials = best_runs(self._study, 1)
        if not trials:
            raise RunError(
                "no trial has finished; for the reasons, run python -m lm.report"
                f" {shlex.quote(self._search.directory)}"
            )
        best, number = trials[0], trials[0].user_attrs[RUN]
        path = write_best(self._search, best)  # the driver that found it may have been killed
        tested = self._study.user_attrs.get(TEST, {})
        if tested.get("trial") != number:
            logger.info("testing the best trial")
            config = dataclasses.replace(self._search.file.config, **best.user_attrs[CONFIG])
            directory = trial_dir(self._search.directory, number)
            job = TrialJob(directory, config, self._search, test_on="best")
            outcome = self._run_job(job, lambda: None)
            if outcome.kind != "finished":
                raise RunError(f"cannot test the best trial ({outcome.reason}); {self._resume}")
            tested = {"trial": number, "perplexity": job.test_perplexity()}
            self._study.set_user_attr(TEST, tested)
        logger.info(
            "best: trial %d, valid perplexity %.2f, test perplexity %.2f, config %s",
            number, best.value, tested["perplexity"], path,
        )  # fmt: skip
