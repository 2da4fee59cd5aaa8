"""Dropout with masks that do not depend on the number of ranks."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from lm.model.ops import Ops

_MAX_SITES = 1024  # of a step; with more, the last would get the masks of the next step's first


def dropout(
    x_TBH: tf.Tensor,
    keep_prob: float,
    seed: int,
    step: tf.Tensor,
    site: int,
    first_row: int,
    ops: Ops,
) -> tf.Tensor:
    """Drop units with masks that depend on (seed, step, site, global row) alone.

    So the same rows get the same masks however many ranks share them, and after a resume. Each
    row owns a range of the counters of the Philox generator (Salmon et al. 2011, "Parallel
    random numbers: as easy as 1, 2, 3"), whose every counter gives four numbers.

    Args:
      x_TBH: Activations.
      keep_prob: Probability of keeping a unit; kept ones are divided by it.
      seed: The run's seed.
      step: int64 scalar, the global step.
      site: Which dropout of the model this is; the sites get independent masks.
      first_row: Global index of the first of the B rows.
      ops: What computes it.

    Returns:
      [T, B, H].
    """
    if keep_prob == 1.0:
        return x_TBH
    num_steps, _, units = x_TBH.shape.as_list()
    counters_per_row = -(-num_steps * units // 4)
    key = tf.constant([seed], tf.uint64)
    counter = tf.stack(
        [
            tf.constant(first_row * counters_per_row, tf.uint64),
            tf.cast(step, tf.uint64) * _MAX_SITES + site,
        ]
    )
    return ops.dropout(x_TBH, keep_prob, key, counter)
