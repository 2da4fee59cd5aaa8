"""All ranks do the same run, or none does: from their settings to the bits of their weights."""

from __future__ import annotations

import hashlib
import json
import pathlib
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, TypeVar

import numpy as np

from lm.distributed.communicator import Communicator
from lm.distributed.naming import by_rank
from lm.errors import ProgramExit, RunError, UserError

T = TypeVar("T")
Gather = Callable[[Any], list]
_KINDS = {kind.__name__: kind for kind in (UserError, RunError)}

_SOURCES = {".py", ".cc", ".h", ".conf"}
_PACKAGE = pathlib.Path(__file__).parents[1]


def code_checksum(package: pathlib.Path = _PACKAGE) -> str:
    """Return a SHA-256 over the package: its Python, its compiled ops' sources, its MPI rules."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in _SOURCES and path.is_file():  # Emacs leaves links that lead nowhere
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


def together(comm: Communicator, work: Callable[[], T], takes_part: bool = True) -> T:
    """Do on each rank what may fail on some of them only; then it fails on all.

    Args:
      comm: The ranks.
      work: Exchanges nothing.
      takes_part: Whether this rank does it.

    Returns:
      What `work` returned on this rank; None where it takes no part.

    Raises:
      UserError, RunError: It has failed on some rank; the same on all ranks.
    """
    result, outcome = None, takes_part  # or what went wrong
    try:
        if takes_part:
            result = work()
    except (ProgramExit, OSError) as error:
        kind = UserError if isinstance(error, UserError) else RunError
        outcome = {"kind": kind.__name__, "message": str(error), "host": socket.gethostname()}
    outcomes = comm.gather(outcome)
    failed = [rank for rank, found in enumerate(outcomes) if not isinstance(found, bool)]
    if failed:
        first = outcomes[failed[0]]
        message = first["message"]
        if True in outcomes:  # it went well on others
            message = f"rank {failed[0]} on {first['host']}: {message}"
        raise _on_every_rank(_KINDS[first["kind"]](message))
    return result


def _on_every_rank(error: ProgramExit) -> ProgramExit:
    error.on_every_rank = True
    return error


def check_agreement(facts: Mapping[str, Any], gather: Gather) -> None:
    """Check that all ranks hold the same facts.

    Ranks that differ in a size would deadlock or crash in the first exchange; ranks that differ
    in a seed or a corpus would train something that nobody asked for.

    Args:
      facts: What this rank is about to train, the same names on each.
      gather: Returns the values of all ranks, by rank.

    Raises:
      UserError: Names the first fact that differs, its values and their ranks.
    """
    difference = _difference(facts, gather)
    if difference:
        raise _on_every_rank(
            UserError(
                f"the ranks disagree on {difference}: start all with the same code, packages, data"
                " and settings"
            )
        )


def _difference(facts: Mapping[str, Any], gather: Gather) -> Optional[str]:
    # The facts of 1,000 ranks are megabytes, for each of them to receive and to read: they are
    # exchanged only where their checksums differ.
    text = json.dumps(facts, sort_keys=True)
    checksums = gather(hashlib.sha256(text.encode()).hexdigest())
    return first_disagreement(gather(facts)) if len(set(checksums)) > 1 else None


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


def first_divergence(variables: Mapping[str, np.ndarray], gather: Gather) -> Optional[str]:
    """Compare the variables of all ranks, bit by bit.

    Args:
      variables: Those of this rank, by name.
      gather: Returns the values of all ranks, by rank.

    Returns:
      The same on all ranks: the first variable that differs, and the ranks by what they hold; None
      where all agree.
    """
    checksums = {n: f"{zlib.crc32(np.ascontiguousarray(v)):08x}" for n, v in variables.items()}
    return _difference(checksums, gather)
