"""All ranks must start with the same run, or none starts."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from lm.errors import UserError

_SOURCES = {".py", ".cc", ".h", ".conf"}
_PACKAGE = pathlib.Path(__file__).parents[1]


def code_checksum(package: pathlib.Path = _PACKAGE) -> str:
    """Return a SHA-256 over the package: its Python, its compiled ops' sources, its MPI rules."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(str(path.relative_to(package)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def platform_facts() -> dict[str, Any]:
    """Return what of this rank's software and device must be the same on all ranks, by name.

    The CPU's instruction set is not of it: the graph is the same, only results depend on it.
    """
    import tensorflow as tf

    from lm import kernels
    from lm.distributed.horovod import horovod_version

    return {
        "code": code_checksum(),
        "tensorflow": tf.__version__,
        "horovod": horovod_version(),
        # Ranks with and without them build different graphs, whose exchanges would not match.
        "compiled_ops": kernels.available(),
        "device": "GPU" if tf.config.list_physical_devices("GPU") else "CPU",
    }


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
        raise UserError(
            f"the ranks disagree on {difference}: start all with the same code, packages, data and"
            " settings"
        )


def first_disagreement(facts_by_rank: Sequence[Mapping[str, Any]]) -> Optional[str]:
    """Name the first fact that is not the same on all ranks, its values and their ranks.

    Args:
      facts_by_rank: JSON-serializable facts by name, by rank.

    Returns:
      Such as "seed: 1 on ranks 0, 2; 3 on rank 1", or None where all agree.
    """
    for name in dict.fromkeys(name for facts in facts_by_rank for name in facts):
        values = [facts.get(name) for facts in facts_by_rank]
        if any(value != values[0] for value in values):
            return f"{name}: {by_rank(values)}"
    return None


def by_rank(values: Sequence[Any]) -> str:
    """Tell which ranks have which value, such as "1 on ranks 0, 2; 3 on rank 1".

    Args:
      values: JSON-serializable values, by rank.
    """
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        shown = value if isinstance(value, str) else json.dumps(value)
        ranks_by_value.setdefault(shown, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for value, ranks in ranks_by_value.items()
    )
