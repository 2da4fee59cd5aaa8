"""The driver: one loop that starts the jobs of trials and observes them."""

import collections
import shlex
import signal
import time

import optuna
from optuna.trial import TrialState

from lm import logger
from lm.distributed.signals import Signals
from lm.errors import RunError, Stopped, UserError
from lm.search.results import best_command, perplexity_of, progress_line, write_best
from lm.search.settings import trial_dir
from lm.search.slots import TrialSlots
from lm.search.study import (
    EPOCHS,
    FAILURE,
    Search,
    best_trials,
    count_unfinished,
    interrupt,
    storage_errors,
)
from lm.search.trial import Outcome, TrialJob

TICK_SECONDS = 0.5
_MAX_FAILURES = 3  # failed jobs of a trial
_MAX_SAME_FAILURES = 3  # trials that fail with the same error while no trial succeeds


class Driver:
    """Runs the trials of a search until all are finished."""

    def __init__(self, search: Search, signals: Signals):
        self._search, self._study, self._signals = search, search.study, signals
        self._running: dict[TrialSlots, tuple[optuna.Trial, TrialJob]] = {}
        self._failed_jobs: collections.Counter = collections.Counter()  # for each trial
        self._same_failures: collections.Counter = collections.Counter()  # for each reason
        command = f"python -m lm.search --output_dir {shlex.quote(search.directory)} --resume"
        self._resume = f"resume with: {command}"
        if search.options.hosts:
            self._resume = f"on the hosts of the new job, {self._resume} --hosts HOSTS"

    def run(self) -> None:
        """Run trials until the search is complete."""
        num_trials, directory = self._search.options.trials, self._search.directory
        slots_of_trials = self._search.slots
        num_slots = len(slots_of_trials)
        logger.info("searching: %d trials, %d at a time, in %s", num_trials, num_slots, directory)
        with storage_errors(f"the running trials are saved; {self._resume}"):
            self._signals.defer()  # a stop waits until the running trials are saved
            try:
                while unfinished := count_unfinished(self._study, num_trials):
                    idle = [slots for slots in slots_of_trials if slots not in self._running]
                    if idle and unfinished > len(self._running):
                        self._start(idle[0])
                    for slots, (trial, job) in list(self._running.items()):
                        if not self._observe(trial, job):
                            self._end(trial, job, job.outcome())
                            del self._running[slots]
                    self._tick()
            finally:
                self._interrupt_all()
            self._report_best()

    def _start(self, slots: TrialSlots) -> None:
        trial = self._study.ask()  # an interrupted trial or a new trial
        try:
            config = self._search.config_of(trial)
        except UserError as error:
            self._fail(trial, Outcome("failed", str(error), is_user_error=True))
            return
        # An interrupted trial continues, even if a later trial with the same values has finished.
        same = [
            other
            for other in best_trials(self._study)
            if other.params == trial.params and other.number < trial.number
        ]
        if same:  # Training again would give bitwise the same result.
            logger.info("trial %d repeats trial %d", trial.number, same[0].number)
            self._finish(trial, TrialState.COMPLETE, same[0].value)
        else:
            directory = trial_dir(self._search.directory, trial.number)
            self._running[slots] = trial, TrialJob(directory, config, self._search, slots)

    def _observe(self, trial: optuna.Trial, job: TrialJob) -> bool:
        """Report new epochs to the study, stop a pruned trial, and return whether the job runs."""
        is_running = job.poll()
        for found in job.new_validations():
            if found.epochs is None:  # --eval_every_steps
                continue
            trial.set_user_attr(EPOCHS, found.epochs)
            if found.epochs % 1:  # the run ends within an epoch
                continue
            # A second report of an epoch has no effect.
            trial.report(found.perplexity, int(found.epochs))
            # If the run has already taken its last step, it ignores the stop signal and finishes.
            if trial.should_prune():
                job.stop()
        return is_running

    def _end(self, trial: optuna.Trial, job: TrialJob, outcome: Outcome) -> None:
        if outcome.kind in ("finished", "stopped"):
            self._same_failures.clear()
        if outcome.kind == "finished":
            self._finish(
                trial, TrialState.COMPLETE, min(found.perplexity for found in job.validations())
            )
        elif outcome.kind == "stopped":
            self._finish(trial, TrialState.PRUNED)
        elif self._is_retried(trial, outcome):
            interrupt(self._study, [trial])
        else:
            self._count(outcome, job.directory)
            self._fail(trial, outcome)

    def _is_retried(self, trial: optuna.Trial, outcome: Outcome) -> bool:
        self._failed_jobs[trial.number] += 1
        count, retries = self._failed_jobs[trial.number], _MAX_FAILURES - 1
        if outcome.is_user_error or count > retries:
            return False
        logger.warning(
            "trial %d failed (%s); retrying, %d of %d", trial.number, outcome.reason, count, retries
        )
        return True

    def _count(self, outcome: Outcome, directory: str) -> None:
        """End the search if several trials fail with the same error; the last one can continue."""
        failure = outcome.reason.replace(directory, "")
        self._same_failures[failure] += 1
        count = self._same_failures[failure]
        if count == _MAX_SAME_FAILURES:
            # After an error of the user, a scheduler must not queue the job again.
            error = UserError if outcome.is_user_error else RunError
            raise error(
                f"{count} trials failed with the same error: {failure}; fix it, then {self._resume}"
            )

    def _fail(self, trial: optuna.Trial, outcome: Outcome) -> None:
        trial.set_user_attr(FAILURE, outcome.reason)
        # The sampler ignores failed trials, but it must avoid values that caused a failure.
        self._finish(trial, TrialState.PRUNED if outcome.is_user_error else TrialState.FAIL)

    def _finish(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> None:
        logger.info("%s", progress_line(self._study.tell(trial, value, state)))
        write_best(self._search)

    def _tick(self) -> None:
        time.sleep(TICK_SECONDS)
        if self._signals.stop:
            name = signal.Signals(self._signals.stop).name
            message = f"stopped by {name}. The running trials are saved; {self._resume}"
            raise Stopped(message, self._signals.stop)

    def _interrupt_all(self) -> None:
        """Save the running trials, which the next driver continues."""
        for wait in (False, True):
            for _, job in self._running.values():
                job.stop(wait)
        interrupt(self._study, [trial for trial, _ in self._running.values()])

    def _report_best(self) -> None:
        best = best_trials(self._study)
        if not best:
            command = f"python -m lm.report {shlex.quote(self._search.directory)}"
            raise UserError(f"no trial has finished; for the reasons, run {command}")
        directory = trial_dir(self._search.directory, best[0].number)
        write_best(self._search)
        logger.info(
            "best: %s, valid perplexity %s; train its config with: %s",
            directory,
            perplexity_of(best[0]),
            best_command(self._search.directory, self._search.settings),
        )
