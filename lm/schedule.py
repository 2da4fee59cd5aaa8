"""The learning rate of each step, and early stopping.

A schedule is a function and an entry of `SCHEDULES`. Its name is a choice of `Config.lr_schedule`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lm.config import Config


class Position(NamedTuple):
    """A position in the training."""

    step: int  # the global step, which starts at 0
    steps_per_epoch: int
    valid_perplexities: Sequence[float] = ()  # results of all earlier validations


class Schedule(NamedTuple):
    """A schedule. The facts decide which settings may differ when a run is resumed."""

    factor: Callable[[Config, Position], float]  # the learning rate, divided by `learning_rate`
    has_horizon: bool = False  # whether the factor of each step depends on the length of the run
    follows_validation: bool = False  # whether the factor depends on the validation perplexities


def _decay(config: Config, at: Position) -> float:
    """Return lr_decay^max(epoch - lr_decay_start_epoch + 1, 0). Epochs are counted from 1."""
    epoch = at.step // at.steps_per_epoch + 1
    return config.lr_decay ** max(epoch - config.lr_decay_start_epoch + 1, 0)


def _plateau(config: Config, at: Position) -> float:
    """Return lr_plateau_factor^n after n validations without a new best perplexity.

    pytorch/examples does the same in word_language_model/main.py.
    """
    return config.lr_plateau_factor ** _bests(at.valid_perplexities).count(False)


def _linear(config: Config, at: Position) -> float:
    return _falling(config, 1 - _progress(config, at))


def _cosine(config: Config, at: Position) -> float:
    """Return equation 5 of Loshchilov & Hutter (2017), arXiv:1608.03983.

    There is a single period, and the minimum is `lr_min_ratio`.
    """
    return _falling(config, (1 + math.cos(math.pi * _progress(config, at))) / 2)


def _falling(config: Config, factor: float) -> float:
    """Map a factor from 1 to 0 to a factor from 1 to `lr_min_ratio`."""
    return config.lr_min_ratio + (1 - config.lr_min_ratio) * factor


def _inverse_sqrt(config: Config, at: Position) -> float:
    """Return the schedule of Vaswani et al. (2017), arXiv:1706.03762, section 5.3.

    `learning_rate` is the largest rate, which the warmup reaches. The paper counts steps from 1.
    """
    warmup = max(config.warmup_steps, 1)  # Runs of older versions may lack a warmup.
    return math.sqrt(warmup / max(at.step, warmup))


SCHEDULES = {
    "decay": Schedule(_decay),
    "plateau": Schedule(_plateau, follows_validation=True),
    "linear": Schedule(_linear, has_horizon=True),
    "cosine": Schedule(_cosine, has_horizon=True),
    "inverse_sqrt": Schedule(_inverse_sqrt),
}


def planned_steps(config: Config, steps_per_epoch: int, max_steps: int | None = None) -> int:
    """Return the length of a run in steps, which `max_steps` may limit."""
    length = config.num_steps_total or config.num_epochs * steps_per_epoch
    return min(length, max_steps or length)


def learning_rate_at(
    config: Config,
    step: int,
    steps_per_epoch: int,
    num_ranks: int = 1,
    valid_perplexities: Sequence[float] = (),
) -> float:
    """Return the learning rate of a step, which increases linearly from 0 during the warmup."""
    position = Position(step, steps_per_epoch, valid_perplexities)
    factor = SCHEDULES[config.lr_schedule].factor(config, position)
    scale = {"none": 1.0, "sqrt": math.sqrt(num_ranks), "linear": float(num_ranks)}
    warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * scale[config.scale_lr_by_worker] * factor * warmup


def has_stalled(valid_perplexities: Sequence[float], epochs: int | None) -> bool:
    """Return whether the last `epochs` epochs have no new best perplexity; False for None."""
    return epochs is not None and not any([True, *_bests(valid_perplexities)][-epochs:])


def _progress(config: Config, at: Position) -> float:
    """Return a number from 0 after the warmup to 1 at the end, even with `max_steps`."""
    num_steps = planned_steps(config, at.steps_per_epoch) - config.warmup_steps
    return max(at.step - config.warmup_steps, 0) / max(num_steps, 1)


def _bests(perplexities: Sequence[float]) -> list[bool]:
    """Return for each perplexity whether it is below all earlier perplexities."""
    best = itertools.accumulate([math.inf, *perplexities], min)
    return [perplexity < earlier for perplexity, earlier in zip(perplexities, best)]
