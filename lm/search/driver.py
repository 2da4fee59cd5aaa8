"""The driver: one loop that starts the jobs of trials and observes them."""

from __future__ import annotations

import collections
import dataclasses
import errno
import logging
import os
import shlex
import signal
import time

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import BaseTrial, TrialState

from lm.distributed.signals import Signals
from lm.errors import RunError, Stopped
from lm.search import storage
from lm.search.opening import Search
from lm.search.options import trial_dir
from lm.search.results import progress_line, write_best
from lm.search.slots import TrialSlots, lost_hosts
from lm.search.trial import Outcome, TrialJob

logger = logging.getLogger("lm")

_TICK_SECONDS = 0.5
_MAX_FAILURES = 3  # failed jobs of a trial
_MAX_SAME_FAILURES = 3  # trials that fail with the same error while no trial succeeds
_DISK_FULL = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)]


class Driver:
    """Runs the trials of a search until all are finished."""

    def __init__(self, search: Search, signals: Signals):
        self._search, self._study, self._signals = search, search.study, signals
        self._slots = list(search.slots)  # only slots on hosts that respond
        self._running: dict[TrialSlots, tuple[optuna.Trial, TrialJob]] = {}
        self._same_failures: collections.Counter = collections.Counter()  # keys are reasons
        self._next_heartbeat = 0.0
        command = f"python -m lm.search --output_dir {shlex.quote(search.directory)} --resume"
        self._resume = f"resume with: {command}"

    def run(self) -> None:
        """Run trials until the search is complete, and test the best trial.

        Raises:
          Stopped: If a signal has arrived. The running trials are saved.
          RunError: If the storage, the disk or the last host is lost. The running trials are saved.
        """
        num_trials, directory = self._search.options.trials, self._search.directory
        num_slots = len(self._slots)
        logger.info("searching: %d trials, %d at a time, in %s", num_trials, num_slots, directory)
        with storage.errors(f"the running trials are saved; {self._resume}"):
            try:
                while states := storage.unfinished_states(self._study, num_trials):
                    idle = [slots for slots in self._slots if slots not in self._running]
                    if idle and TrialState.WAITING in states:
                        self._start(idle[0])
                    for slots, (trial, job) in list(self._running.items()):
                        if not self._is_running(trial, job):
                            del self._running[slots]
                    self._beat()
                    self._tick()
            finally:
                self._interrupt_all()
            with self._search.turn():
                self._test_best()

    def _start(self, slots: TrialSlots) -> None:
        trial = self._search.ask()
        if trial and storage.FAILURE in trial.user_attrs:
            self._finish(trial, TrialState.FAIL)
        elif trial:
            self._running[slots] = trial, self._job(trial, slots, test_on="none")

    def _job(self, trial: BaseTrial, slots: TrialSlots, test_on: str) -> TrialJob:
        directory = trial_dir(self._search.directory, trial.number)
        config = dataclasses.replace(self._search.file.config, **trial.user_attrs[storage.CONFIG])
        return TrialJob(directory, config, self._search, slots, test_on)

    def _is_running(self, trial: optuna.Trial, job: TrialJob) -> bool:
        """Return whether a job is running. Report the job's epochs and result to the study."""
        try:
            is_running = job.is_running()
            for epoch, perplexity in job.new_perplexities():
                trial.report(perplexity, epoch)  # a second report of an epoch has no effect
                if epoch < job.config.num_epochs and trial.should_prune():
                    job.stop()
            if not is_running:
                self._end(trial, job, job.outcome())
            return is_running
        except UpdateFinishedTrialError:  # this driver was suspended
            logger.warning("another driver took over %s", job.directory)
            job.stop(wait=True)
            return False

    def _end(self, trial: optuna.Trial, job: TrialJob, outcome: Outcome) -> None:
        if outcome.kind == "finished":
            self._finish(trial, TrialState.COMPLETE, min(job.perplexities().values()))
        elif outcome.kind == "stopped":
            self._finish(trial, TrialState.PRUNED)
        elif self._has_lost_host(job, outcome) or self._is_retried(trial, outcome):
            storage.interrupt(self._study, [trial])
        else:
            self._count(outcome.reason.replace(job.directory, ""))
            trial.set_user_attr(storage.FAILURE, outcome.reason)
            self._finish(trial, TrialState.FAIL)

    def _has_lost_host(self, job: TrialJob, outcome: Outcome) -> bool:
        """Return whether a job failed because a host is lost, and do not use its slots again.

        Raises:
          RunError: If the disk is full, or no host is left. The next trials would fail too.
        """
        failure = f"{job.directory} failed ({outcome.reason})"
        if any(text in outcome.reason for text in _DISK_FULL):
            raise RunError(f"{failure}; free some space, then {self._resume}")
        lost = [] if outcome.is_user_error else lost_hosts(job.slots)
        if lost:
            logger.warning("%s no longer responds; %s", " and ".join(lost), failure)
            self._slots.remove(job.slots)
        if not self._slots:
            raise RunError(f"no host is left to run trials on; {self._resume}")
        return bool(lost)

    def _is_retried(self, trial: optuna.Trial, outcome: Outcome) -> bool:
        num_failures = trial.user_attrs.get(storage.NUM_FAILURES, 0) + 1
        if outcome.is_user_error or num_failures == _MAX_FAILURES:
            return False
        trial.set_user_attr(storage.NUM_FAILURES, num_failures)
        attempt = f"{num_failures} of {_MAX_FAILURES - 1}"
        logger.warning("trial %d failed (%s); retrying, %s", trial.number, outcome.reason, attempt)
        return True

    def _count(self, failure: str) -> None:
        """Raise RunError if trials fail with the same error. The last of them is continued."""
        self._same_failures[failure] += 1
        count = self._same_failures[failure]
        if count == _MAX_SAME_FAILURES:
            raise RunError(
                f"{count} trials failed with the same error: {failure}; fix it, then {self._resume}"
            )

    def _finish(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> None:
        finished = storage.finish(trial, state, value)
        if state != TrialState.FAIL:
            self._same_failures.clear()
        logger.info("%s", progress_line(finished))
        write_best(self._search)

    def _tick(self) -> None:
        time.sleep(_TICK_SECONDS)
        if self._signals.stop:
            name = signal.Signals(self._signals.stop).name
            message = f"stopped by {name}. The running trials are saved; {self._resume}"
            raise Stopped(message, self._signals.stop)

    def _beat(self) -> None:
        """Record that this driver is alive, and interrupt the trials of dead drivers."""
        if time.monotonic() >= self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + storage.HEARTBEAT_SECONDS
            for trial, _ in self._running.values():
                storage.record_heartbeat(trial)
            with self._search.turn():
                storage.interrupt_stale(self._study)

    def _interrupt_all(self) -> None:
        """Save the running trials, which this or another driver continues."""
        for wait in (False, True):
            for _, job in self._running.values():
                job.stop(wait)
        storage.interrupt(self._study, [trial for trial, _ in self._running.values()])

    def _test_best(self) -> None:
        """Test the best trial. No other trial uses the test split."""
        best = storage.best_trials(self._study)
        if not best:
            command = f"python -m lm.report {shlex.quote(self._search.directory)}"
            raise RunError(f"no trial has finished; for the reasons, run {command}")
        trial, tested = best[0], self._study.user_attrs.get(storage.TEST, {})
        while tested.get("trial") != trial.number:
            logger.info("testing the best trial")
            job = self._job(trial, self._slots[0], test_on="best")
            try:
                while job.is_running():
                    self._tick()
            finally:
                job.stop(wait=True)
            outcome = job.outcome()
            if outcome.kind == "finished":
                tested = {"trial": trial.number, "perplexity": job.test_perplexity()}
                self._study.set_user_attr(storage.TEST, tested)
            elif not self._has_lost_host(job, outcome):
                raise RunError(f"cannot test the best trial ({outcome.reason}); {self._resume}")
        logger.info(
            "best: trial %d, valid perplexity %.2f, test perplexity %.2f, config %s",
            trial.number, trial.value, tested["perplexity"], write_best(self._search),
        )  # fmt: skip
