"""Do all ranks still hold the same weights? Broken memory or a bug can part them in silence."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lm.agreement import first_disagreement
from lm.errors import EveryRankError


def check_in_sync(
    variables: Mapping[str, np.ndarray], gather: Callable[[Any], list], step: int
) -> None:
    """Check that the variables are the same on all ranks, bit by bit.

    Args:
      variables: Those of this rank, by name.
      gather: Returns the values of all ranks, by rank.
      step: For the message.

    Raises:
      EveryRankError: Names the first variable that differs, and the ranks by what they hold.
    """
    checksums = {n: f"{zlib.crc32(np.ascontiguousarray(v)):08x}" for n, v in variables.items()}
    difference = first_disagreement(gather(checksums))
    if difference:
        raise EveryRankError(
            f"at step {step} the ranks disagree on the weights: checksum of {difference}; continue"
            " from the last checkpoint with --resume, and suspect the memory of the rank that"
            " differs"
        )
