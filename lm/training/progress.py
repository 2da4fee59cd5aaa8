"""Where a run is: the step, and the sums that its next events will be made of."""

from __future__ import annotations

import dataclasses
from typing import Optional

from lm.model.perplexity import NllSum


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
    skipped_updates: int = 0  # dropped by --on_nan skip
    valid_perplexity: Optional[float] = None  # of the weights after this step, where known

    def add(self, nll: NllSum, seconds: float, exchange_seconds: float) -> None:
        """Count one step."""
        self.step += 1
        self.epoch_nll += nll
        self.event_nll += nll
        self.epoch_seconds += seconds
        self.event_seconds += seconds
        self.event_exchange_seconds += exchange_seconds
        self.valid_perplexity = None
