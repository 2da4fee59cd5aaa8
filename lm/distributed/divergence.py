"""Do all ranks still hold the same weights? Unlike hosts or a bug can part them in silence."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Optional

import numpy as np

from lm.distributed.agreement import first_disagreement


def first_divergence(
    variables: Mapping[str, np.ndarray], gather: Callable[[Any], list]
) -> Optional[str]:
    """Compare the variables of all ranks, bit by bit.

    Args:
      variables: Those of this rank, by name.
      gather: Returns the values of all ranks, by rank.

    Returns:
      The same on all ranks: the first variable that differs, and the ranks by what they hold; None
      where all agree.
    """
    checksums = {n: f"{zlib.crc32(np.ascontiguousarray(v)):08x}" for n, v in variables.items()}
    return first_disagreement(gather(checksums))
