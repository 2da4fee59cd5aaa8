"""Ranks in words: short, however many there are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

_SHOWN = 8  # at most so many values, and so many stretches of ranks: a line is to be read


def name_ranks(ranks: Sequence[int]) -> str:
    """Name some ranks, such as "rank 3" or "ranks 0 to 14, 16".

    Args:
      ranks: Ascending.
    """
    stretches = []
    # Ranks that follow each other are as far from their places in the list.
    for _, stretch in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0]):
        found = [rank for _, rank in stretch]
        stretches.append(f"{found[0]} to {found[-1]}" if len(found) > 2 else _listed(found))
    shown = _listed(stretches[:_SHOWN])
    if len(stretches) > _SHOWN:
        shown += f" and others, {len(ranks)} in all"
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def by_rank(values: Sequence[Any]) -> str:
    """Tell which ranks have which value, such as "1 on ranks 0, 2; 3 on rank 1".

    Args:
      values: JSON-serializable values, by rank.
    """
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        shown = value if isinstance(value, str) else json.dumps(value)
        ranks_by_value.setdefault(shown, []).append(rank)
    parts = [f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
    if len(parts) > _SHOWN:
        parts[_SHOWN:] = [f"{len(parts) - _SHOWN} other values"]
    return "; ".join(parts)


def _listed(parts: Sequence[Any]) -> str:
    return ", ".join(map(str, parts))
