"""The learning rate of each step, and early stopping."""

import math
from collections.abc import Sequence

from lm.config import Config


def learning_rate_at(
    config: Config,
    step: int,
    steps_per_epoch: int,
    num_ranks: int = 1,
    valid_perplexities: Sequence[float] = (),
) -> float:
    """Return the learning rate of a global step, which starts at 0.

    decay: learning_rate * lr_decay^max(epoch - lr_decay_start_epoch + 1, 0), epochs counted from 1.
    plateau: learning_rate * lr_plateau_factor^n after n validations without a new best
    perplexity, as in pytorch/examples, word_language_model/main.py.
    linear: learning_rate * (1 - t), where t increases from 0 after the warmup to 1 after
    num_epochs. `max_steps` does not change t.
    cosine: learning_rate * (1 + cos(pi t)) / 2, equation 5 of Loshchilov & Hutter (2017),
    arXiv:1608.03983, for a single period and a minimum of 0.
    All increase linearly from 0 over the first `warmup_steps`. `valid_perplexities` are the results
    of all earlier validations.
    """
    if config.lr_schedule == "plateau":
        decay = config.lr_plateau_factor ** _bests(valid_perplexities).count(False)
    elif config.has_horizon:
        num_steps = config.num_epochs * steps_per_epoch - config.warmup_steps
        t = max(step - config.warmup_steps, 0) / max(num_steps, 1)
        decay = 1 - t if config.lr_schedule == "linear" else (1 + math.cos(math.pi * t)) / 2
    else:
        epoch = step // steps_per_epoch + 1
        decay = config.lr_decay ** max(epoch - config.lr_decay_start_epoch + 1, 0)
    scale = {"none": 1.0, "sqrt": math.sqrt(num_ranks), "linear": float(num_ranks)}
    warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * scale[config.scale_lr_by_worker] * decay * warmup


def has_stalled(valid_perplexities: Sequence[float], epochs: int | None) -> bool:
    """Return whether the last `epochs` epochs have no new best perplexity; False for None."""
    return epochs is not None and not any([True, *_bests(valid_perplexities)][-epochs:])


def _bests(perplexities: Sequence[float]) -> list[bool]:
    """Return for each perplexity whether it is below all earlier perplexities."""
    best, found = math.inf, []
    for perplexity in perplexities:
        found.append(perplexity < best)
        best = min(best, perplexity)
    return found
