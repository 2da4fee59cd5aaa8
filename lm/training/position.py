"""Where a run is: the step, and the sums that its next events will be made of."""

from __future__ import annotations

import dataclasses
from typing import Optional

from lm.perplexity import NllSum


@dataclasses.dataclass
class Position:
    """All of a run's progress that is neither a weight nor a recurrent state.

    The window of the corpus and the learning rate follow from the step. The sums are kept so
    that the events of a resumed run equal those of one that was never stopped.
    """

    step: int = 0  # updates done
    epochs_done: int = 0  # validated ones; the last step of an epoch comes before that
    epoch_nll: NllSum = NllSum()  # of the steps of the unfinished epoch
    epoch_seconds: float = 0.0
    event_nll: NllSum = NllSum()  # of the steps since the last step event
    event_seconds: float = 0.0
    event_exchange_seconds: float = 0.0  # what of them went into the exchange of gradients
    valid_perplexity: Optional[float] = None  # of the weights after this step, where known
    valid_perplexities: tuple[float, ...] = ()  # of the finished epochs
    averages_from: Optional[int] = None  # the weights after the steps past this one are averaged
    exact_with: Optional[str] = None  # what has computed all steps, where they are exact

    @property
    def averaged(self) -> int:
        """How many steps' weights the average is of; 0: there is none, or not yet."""
        return 0 if self.averages_from is None else self.step - self.averages_from

    def add(self, nll: NllSum, seconds: float, exchange_seconds: float) -> None:
        """Count one step."""
        self.step += 1
        self.epoch_nll += nll
        self.event_nll += nll
        self.epoch_seconds += seconds
        self.event_seconds += seconds
        self.event_exchange_seconds += exchange_seconds
        self.valid_perplexity = None

    def finish_epoch(self, epoch: int, asgd_trigger_epochs: Optional[int]) -> None:
        """Count an epoch whose steps are done and whose validation, if there is one, is over."""
        self.epochs_done, self.epoch_nll, self.epoch_seconds = epoch, NllSum(), 0.0
        if self.valid_perplexity is None:
            return
        earlier = self.valid_perplexities
        self.valid_perplexities += (self.valid_perplexity,)
        if asgd_trigger_epochs and self.averages_from is None:
            # In algorithm 1 of Merity et al. 2018 the `asgd_trigger_epochs` last ones are compared
            # with. By its authors' word and code they are those left out.
            old = earlier[:-asgd_trigger_epochs]
            if old and self.valid_perplexity > min(old):
                self.averages_from = self.step
