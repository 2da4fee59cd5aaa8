"""The learning rate of each step."""

from __future__ import annotations

import math

from lm.config import Config


def learning_rate_at(config: Config, step: int, steps_per_epoch: int, num_ranks: int = 1) -> float:
    """Return the learning rate of a global step.

    learning_rate * lr_decay^max(epoch - lr_decay_start_epoch + 1, 0), epochs counted from 1;
    raised linearly from 0 over the first `warmup_steps`.

    Args:
      config: The schedule.
      step: Global step, from 0.
      steps_per_epoch: Steps of an epoch.
      num_ranks: Number of ranks, for `scale_lr_by_worker`.
    """
    epoch = step // steps_per_epoch + 1
    decay = config.lr_decay ** max(epoch - config.lr_decay_start_epoch + 1, 0)
    scale = {"none": 1.0, "sqrt": math.sqrt(num_ranks), "linear": float(num_ranks)}
    warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    return config.learning_rate * scale[config.scale_lr_by_worker] * decay * warmup
