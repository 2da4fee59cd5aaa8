"""The loop of a search: start trials where there is room, watch them, and tell Optuna."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import logging
import os
import shlex
import signal
import time
from collections.abc import Mapping
from typing import Optional

import optuna
from optuna.trial import TrialState

from lm import run_files
from lm.distributed.signals import Signals
from lm.errors import ProgramExit, RunError, Stopped, UserError
from lm.report.search import best_table, best_trials, progress_line
from lm.search.job import Job, valid_perplexities
from lm.search.places import lost_hosts
from lm.search.prepare import Prepared
from lm.search.space import SuggestFailed, config_of
from lm.search.study import Study, storage_errors
from lm.search.winner import write_best

logger = logging.getLogger("lm")

_TICK_SECONDS = 0.5
_MOST_JOBS = 3  # of a trial: it is tried again twice
_MOST_ALIKE = 3  # trials that fail alike, while none ends well
# Exit codes of a training that was asked to stop: one that has saved; one that was about to begin
# or to end, which the signal kills, alone or under mpirun.
_STOPPED = 128 + signal.SIGTERM, -signal.SIGUSR2, 128 + signal.SIGUSR2
_NO_ROOM = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)]
_TABLE_EVERY = 10  # finished trials
_IS_BAD = "is bad"  # attribute of a trial that is to be pruned


class Driver:
    """Runs the trials of a study until all are finished.

    Args:
      directory: Of the search.
      search: What is tried, and where.
      study: Its trials.
      signals: What has asked this process to stop.
    """

    def __init__(self, directory: str, search: Prepared, study: Study, signals: Signals):
        self._directory, self._search = directory, search
        self._study, self._signals = study, signals
        self._free = list(search.places)
        self._jobs: list[Job] = []
        self._failed_alike: collections.Counter = collections.Counter()  # by the reason
        self._go_on = f"go on with: {resume_command(directory)}"

    def run(self) -> None:
        """Run trials until there are enough.

        Raises:
          Stopped: A signal has asked for it; the trials that ran have saved.
          RunError: The storage, the disk or the last host is gone; likewise.
        """
        logger.info(
            "searching: %d trials, %d at a time; their runs: %s",
            self._study.num_trials,
            len(self._free),
            os.path.join(self._directory, run_files.TRIALS),
        )
        try:
            with storage_errors(f"the running trials have saved; {self._go_on}"):
                while self._turn():
                    time.sleep(_TICK_SECONDS)
        finally:
            self._stop_jobs()

    def stop_if_asked(self) -> None:
        """End the search if a signal has asked for it.

        Raises:
          Stopped: One has; the trials that ran have saved.
        """
        if self._signals.stop:
            self._stop_jobs()
            raise Stopped(
                f"stopped by {signal.Signals(self._signals.stop).name}; the running trials have"
                f" saved; {self._go_on}",
                self._signals.stop,
            )

    def _turn(self) -> bool:
        """Do what there is to do; returns whether there will be more."""
        self.stop_if_asked()
        for job in list(self._jobs):
            if not job.has_started:
                job.start()
            elif job.exit_code() is None:
                self._watch(job)
            else:
                self._settle(job)
        self._study.beat([job.trial for job in self._jobs])
        while self._free and self._start_next():
            pass
        if self._jobs:
            return True
        # Those of other drivers too: should one of those die, its trials are taken over.
        unfinished = bool(self._study.trials(TrialState.RUNNING, TrialState.WAITING))
        if unfinished and not self._free:
            raise RunError(f"no host is left to run trials on; {self._go_on}")
        return unfinished

    def _start_next(self) -> bool:
        trial = self._study.claim()
        if trial is None:
            return False
        directory = run_files.trial_dir(self._directory, trial.number)
        try:
            config = config_of(self._search.space, trial, self._search.config)
            job = Job(trial, config, self._search, directory, self._free[-1])
        except UserError as error:
            self._study.add_failure(trial, str(error))
            if isinstance(error, SuggestFailed):
                self._fail(trial, str(error), directory)
            else:  # these values cannot be used: others can
                self._finish(trial, TrialState.FAIL)
            return True
        trial.set_user_attr("config", dataclasses.asdict(config))
        if _IS_BAD in trial.user_attrs:  # and its driver ended before it had said so
            self._finish(trial, TrialState.PRUNED)
            return True
        self._free.pop()
        self._jobs.append(job)
        job.start()
        return True

    def _watch(self, job: Job) -> None:
        """Report the epochs that are new, and stop the job if they are bad."""
        for epoch, perplexity in self._unknown(job, job.new_metrics()):
            self._study.report(job.trial, perplexity, epoch)
            is_last = epoch >= job.config.num_epochs
            if not job.asked_to_stop and not is_last and job.trial.should_prune():
                # A pruner need not say it twice.
                self._study.mark(job.trial, _IS_BAD, True)
                job.stop()

    def _unknown(self, job: Job, metrics: Mapping[int, float]) -> list[tuple[int, float]]:
        """Return the epochs that the study does not have yet."""
        if not metrics:
            return []
        known = self._study.reported(job.trial)
        return sorted((epoch, value) for epoch, value in metrics.items() if epoch not in known)

    def _settle(self, job: Job) -> None:
        """Say what has come of a job that has ended."""
        values = self._values(job)  # anew: of a file on NFS one may be told old times
        for epoch, perplexity in self._unknown(job, values):
            self._study.report(job.trial, perplexity, epoch)
        if values and job.exit_code() == 0:
            self._leave(job)
            self._finish(job.trial, TrialState.COMPLETE, min(values.values()))
        elif job.asked_to_stop and job.exit_code() in _STOPPED:
            self._leave(job)
            self._finish(job.trial, TrialState.PRUNED)
        else:
            self._settle_failure(job)

    @staticmethod
    def _values(job: Job) -> dict[int, float]:
        try:
            return valid_perplexities(job.directory)
        except ProgramExit:
            return {}

    def _settle_failure(self, job: Job) -> None:
        reason = job.failure()
        if any(text in reason for text in _NO_ROOM):
            # No fault of the trial, and the next ones would meet the same.
            raise RunError(f"trial {job.trial.number}: {reason}; make room, then {self._go_on}")
        is_users = job.exit_code() == UserError.exit_code
        gone = [] if is_users else lost_hosts(job.place)
        if gone:
            logger.warning(
                "%s no longer answers: trial %d goes on elsewhere (%s)",
                " and ".join(gone), job.trial.number, reason,
            )  # fmt: skip
            self._jobs.remove(job)  # and its place is not used again
            self._study.release(job.trial)
            return
        count = self._study.add_failure(job.trial, reason)
        if is_users or count >= _MOST_JOBS:
            self._leave(job)
            self._fail(job.trial, reason, job.directory)
        else:
            logger.warning(
                "trial %d has failed (%s): tried again, %d of %d",
                job.trial.number, reason, count, _MOST_JOBS - 1,
            )  # fmt: skip
            job.again()

    def _fail(self, trial: optuna.Trial, reason: str, directory: str) -> None:
        """Finish a trial that has failed, unless others have failed alike."""
        alike = reason.replace(directory, "")
        self._failed_alike[alike] += 1
        if self._failed_alike[alike] == _MOST_ALIKE:  # most likely no fault of theirs
            self._study.release(trial)
            raise RunError(
                f"{_MOST_ALIKE} trials have failed alike: {reason}; mend that, then {self._go_on}"
            )
        self._finish(trial, TrialState.FAIL)

    def _finish(
        self, trial: optuna.Trial, state: TrialState, value: Optional[float] = None
    ) -> None:
        self._study.tell(trial, state, value)
        if state != TrialState.FAIL:
            self._failed_alike.clear()
        study = self._study.optuna
        logger.info("%s", progress_line(study, trial.number, self._study.num_trials))
        # A driver that has taken the trial over may have told otherwise of it.
        best = best_trials(study, 1)
        if state == TrialState.COMPLETE and best and best[0].number == trial.number:
            write_best(best[0], self._search, self._directory)
        finished = self._study.trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        if len(finished) % _TABLE_EVERY == 0:
            logger.info("%s", best_table(study).text)

    def _leave(self, job: Job) -> None:
        self._jobs.remove(job)
        self._free.append(job.place)

    def _stop_jobs(self) -> None:
        """Have the running trials save; they wait for the next driver."""
        for job in self._jobs:
            job.stop()
        for job in self._jobs:
            job.wait()
        jobs, self._jobs = self._jobs, []
        # Without a storage they stay marked as running, which the next driver sees.
        with contextlib.suppress(RunError), storage_errors(""):
            for job in jobs:
                self._study.release(job.trial)


def resume_command(directory: str) -> str:
    """Return the command line that goes on with a search."""
    return f"python -m lm.search --output_dir {shlex.quote(directory)} --resume"
