"""All ranks must start with the same run, or none starts."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from lm.errors import UserError


def code_checksum() -> str:
    """Return a SHA-256 over this package's Python files."""
    digest = hashlib.sha256()
    package = pathlib.Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_agreement(facts_by_rank: list[Mapping[str, Any]]) -> None:
    """Check that all ranks hold the same facts.

    Ranks that differ in a size would deadlock or crash in the first exchange; ranks that differ
    in a seed or a corpus would train something that nobody asked for.

    Args:
      facts_by_rank: What each rank is about to train, by rank, the same names on each.

    Raises:
      UserError: Names the first fact that differs, its values and their ranks.
    """
    for name in sorted(set().union(*facts_by_rank)):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            value = json.dumps(facts.get(name))
            ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            parts = [
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in ranks_by_value.items()
            ]
            raise UserError(f"the ranks disagree on {name}: {'; '.join(parts)}")
