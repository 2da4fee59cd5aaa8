"""The progress of a run: the step, and the sums for the next events."""

import dataclasses

from lm.perplexity import NllSum


@dataclasses.dataclass
class TrainProgress:
    """The state of a run, except for its variables.

    The window of the corpus and the learning rate follow from the step. The sums are saved so that
    the events of a resumed run equal the events of an uninterrupted run.
    """

    step: int = 0  # number of updates
    epochs_done: int = 0  # number of finished epochs
    epoch_nll: NllSum = NllSum()  # sum over the steps of the unfinished epoch
    epoch_seconds: float = 0.0
    event_nll: NllSum = NllSum()  # sum over the steps since the last step event
    event_seconds: float = 0.0
    event_exchange_seconds: float = 0.0  # time of the gradient exchange in `event_seconds`
    valid_perplexity: float | None = None  # perplexity of the weights after this step
    valid_perplexities: tuple[float, ...] = ()  # results of the validations
    valid_steps: tuple[int, ...] = ()  # the step of each validation
    averages_from: int | None = None  # the average starts after this step
    exact_with: str | None = None  # arithmetic of all steps, if the steps are exact

    @property
    def last_validation(self) -> int:
        """The step of the last validation, or 0."""
        return max(self.valid_steps, default=0)

    def epoch_perplexities(self, steps_per_epoch: int) -> list[float]:
        """Return the validation perplexities at the ends of epochs."""
        results = zip(self.valid_steps, self.valid_perplexities)
        return [perplexity for step, perplexity in results if step % steps_per_epoch == 0]

    @property
    def num_averaged(self) -> int:
        """Number of averaged weights; 0 if there is no average yet."""
        return 0 if self.averages_from is None else self.step - self.averages_from

    def add(self, nll: NllSum, seconds: float, exchange_seconds: float) -> None:
        self.step += 1
        self.epoch_nll += nll
        self.event_nll += nll
        self.epoch_seconds += seconds
        self.event_seconds += seconds
        self.event_exchange_seconds += exchange_seconds
        self.valid_perplexity = None

    def record_validation(self) -> None:
        """Let the schedule and the choice of the best checkpoint use `valid_perplexity`."""
        self.valid_perplexities += (self.valid_perplexity,)
        self.valid_steps += (self.step,)

    def finish_epoch(self, epoch: int, asgd_trigger_epochs: int | None) -> None:
        """Finish an epoch after its validation."""
        self.epochs_done, self.epoch_nll, self.epoch_seconds = epoch, NllSum(), 0.0
        if self.valid_perplexity is None:
            return
        earlier = self.epoch_perplexities(self.step // epoch)
        self.record_validation()
        if asgd_trigger_epochs and self.averages_from is None:
            # Algorithm 1 of Merity et al. 2018 compares with the last `asgd_trigger_epochs` epochs.
            # According to the authors and their code, it leaves these epochs out.
            old = earlier[:-asgd_trigger_epochs]
            if old and self.valid_perplexity > min(old):
                self.averages_from = self.step
