"""Programs that train the model, on one rank or several, and measurements taken in turn."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Callable, TypeVar

from lm.benchmark.options import TrainingOptions
from lm.benchmark.workers.process import Worker
from lm.config import Config

_REPEAT_SECONDS = 2.0
_WARM_STEPS = 3  # which tell how many fit into a repeat; at least as many are measured

logger = logging.getLogger("lm")
Name = TypeVar("Name", bound=Hashable)
Measured = TypeVar("Measured")


def in_turn(
    repeats: int, measurements: Mapping[Name, Callable[[], Measured]], what: str = ""
) -> dict[Name, list[Measured]]:
    """Take all measurements, one after the other, again and again: drift meets all alike.

    Args:
      repeats: How often.
      measurements: By name.
      what: Is measured, for the log.

    Returns:
      What each has measured, by repeat.
    """
    found: dict[Name, list[Measured]] = {name: [] for name in measurements}
    for repeat in range(repeats):
        for name, measure in measurements.items():
            found[name].append(measure())
        logger.info("%srepeat %d of %d", f"{what}, " if what else "", repeat + 1, repeats)
    return found


class Trainer(Worker):
    """A program that trains the model; it stands still while another one is asked.

    Args:
      config: The model.
      options: How it is measured.
      batch_sizes: Global batches that will be measured.
      ranks: Number of ranks; above 1 only for "ours".
      contestant: As StepServer's.

    Raises:
      RunError: It cannot run here.
    """

    def __init__(
        self,
        config: Config,
        options: TrainingOptions,
        batch_sizes: Sequence[int],
        ranks: int = 1,
        contestant: str = "ours",
    ):
        self._options = options
        self._counts: dict[tuple, int] = {}
        super().__init__(
            "StepServer",
            {
                "contestant": contestant,
                "config_file": options.config,
                "config": dataclasses.asdict(config),
                "threads": options.threads,
                "batch_sizes": sorted(set(batch_sizes)),
                "data_path": options.data_path,
            },
            ranks=ranks,
            threads=options.threads,
            hosts=options.hosts,
        )

    def measure(self, batch_size: int, exchange: bool = True) -> dict[str, float]:
        """Return `seconds` and `input_seconds` of a step, and `peak_rss`, of the worst rank."""
        kind = (batch_size, exchange)
        if kind not in self._counts:
            fit = round(_REPEAT_SECONDS / self._steps(*kind, _WARM_STEPS)["seconds"])
            self._counts[kind] = self._options.steps_per_repeat or max(_WARM_STEPS, fit)
        return self._steps(*kind, self._counts[kind])

    def _steps(self, batch_size: int, exchange: bool, count: int) -> dict[str, float]:
        by_rank = self.ask(
            "steps",
            batch_size=batch_size,
            exchange=exchange,
            count=count,
            untimed=self._options.untimed_steps,
        )
        names = ("seconds", "input_seconds", "peak_rss")
        return {name: max(each[name] for each in by_rank) for name in names}
