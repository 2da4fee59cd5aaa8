"""All ranks must start with the same run, or none starts."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from lm.errors import UserError


def code_checksum() -> str:
    """Return a SHA-256 over this package's Python files."""
    digest = hashlib.sha256()
    package = pathlib.Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_agreement(facts_by_rank: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks hold the same facts.

    Ranks that differ in a size would deadlock or crash in the first exchange; ranks that differ
    in a seed or a corpus would train something that nobody asked for.

    Args:
      facts_by_rank: What each rank is about to train, by rank, the same names on each.

    Raises:
      UserError: Names the first fact that differs, its values and their ranks.
    """
    difference = first_disagreement(facts_by_rank)
    if difference:
        raise UserError(f"the ranks disagree on {difference}")


def first_disagreement(facts_by_rank: Sequence[Mapping[str, Any]]) -> Optional[str]:
    """Name the first fact that is not the same on all ranks, its values and their ranks.

    Args:
      facts_by_rank: JSON-serializable facts by name, by rank.

    Returns:
      Such as "seed: 1 on ranks 0, 2; 3 on rank 1", or None where all agree.
    """
    for name in dict.fromkeys(name for facts in facts_by_rank for name in facts):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            value = json.dumps(facts.get(name))
            ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            parts = [
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in ranks_by_value.items()
            ]
            return f"{name}: {'; '.join(parts)}"
    return None
