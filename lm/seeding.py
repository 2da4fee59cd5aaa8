"""The random numbers of Python and NumPy, the same each time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let Python and NumPy draw what a seed decides, and after it what they would have drawn.

    Args:
      seed: At least 0, less than 2^64.
    """
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
