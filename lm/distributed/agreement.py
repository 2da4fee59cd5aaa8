"""Agreement of the ranks: errors on all ranks, and equal code, settings and weights."""

import contextlib
import hashlib
import itertools
import json
import pathlib
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lm.distributed.communicator import Communicator
from lm.errors import ProgramExit, RunError, UserError
from lm.system import package_version

_MOST_SHOWN = 8  # values, and ranges of ranks, in a message
_SOURCES = {".py", ".cc", ".h", ".conf"}
_PACKAGE = pathlib.Path(__file__).parents[1]


@contextlib.contextmanager
def on_all_ranks(comm: Communicator) -> Iterator[None]:
    """Raise an error of the `with` block on all ranks if the block fails on any rank.

    All ranks enter the block, but a rank may have nothing to do there. The block contains no
    exchanges, because a rank that fails does not reach them.
    """
    failure = None
    try:
        yield
    except (ProgramExit, OSError) as error:
        is_user_error = isinstance(error, UserError)
        failure = {"user": is_user_error, "message": str(error), "host": socket.gethostname()}
    failures = comm.gather(failure)
    failed = [rank for rank, found in enumerate(failures) if found]
    if failed:
        rank, first = failed[0], failures[failed[0]]
        message = first["message"]
        # Only rank 0 does some of the work. Its name would not help the users of a single host.
        if rank or len(failed) < comm.size != comm.local_size:
            message = f"rank {rank} on {first['host']}: {message}"
        error = UserError(message) if first["user"] else RunError(message)
        error.on_every_rank = True
        raise error


def from_rank_0(comm: Communicator, compute: Callable[[], Any]) -> Any:
    """Return the result of a function that only rank 0 calls. JSON must be able to represent it."""
    with on_all_ranks(comm):
        own = compute() if comm.is_rank_0 else None
    return comm.gather(own)[0]


def check_agreement(comm: Communicator, facts: Mapping[str, Any]) -> None:
    """Check that the facts are equal on all ranks.

    Ranks with different sizes would deadlock or crash in their first exchange. Ranks with different
    seeds or corpora would train the wrong run. Facts are JSON-serializable, and all ranks use the
    same names.
    """
    difference = _mismatch(comm, facts)
    if difference:
        error = UserError(
            f"the ranks disagree on {difference}: start all with the same code, packages, data and"
            " settings"
        )
        error.on_every_rank = True
        raise error


def weights_mismatch(comm: Communicator, parts: Iterable[tuple[str, np.ndarray]]) -> str | None:
    """Return the first variable that differs bitwise between ranks, with its checksums, or None.

    A variable may be divided into consecutive parts.
    """
    checksums: dict[str, int] = {}
    for name, array in parts:
        checksums[name] = zlib.crc32(array.reshape(-1), checksums.get(name, 0))
    return _mismatch(comm, {name: f"{number:08x}" for name, number in checksums.items()})


def _mismatch(comm: Communicator, facts: Mapping[str, Any]) -> str | None:
    # The facts of 1,000 ranks are megabytes. Exchange them only if their checksums differ.
    text = json.dumps(facts, sort_keys=True)
    checksums = comm.gather(hashlib.sha256(text.encode()).hexdigest())
    return first_mismatch(comm.gather(facts)) if len(set(checksums)) > 1 else None


def first_mismatch(facts_by_rank: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe the first fact that differs, as in `seed: 1 on ranks 0, 2; 3 on rank 1`, or None."""
    for name in dict.fromkeys(name for facts in facts_by_rank for name in facts):
        values = [facts.get(name) for facts in facts_by_rank]
        if any(value != values[0] for value in values):
            return f"{name}: {by_rank(values)}"
    return None


def by_rank(values: Sequence[Any]) -> str:
    """Describe the JSON-serializable value of each rank, as in "1 on ranks 0, 2; 3 on rank 1"."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        shown = value if isinstance(value, str) else json.dumps(value)
        ranks_by_value.setdefault(shown, []).append(rank)
    parts = [f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
    if len(parts) > _MOST_SHOWN:
        parts[_MOST_SHOWN:] = [f"{len(parts) - _MOST_SHOWN} more values"]
    return "; ".join(parts)


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in ascending order, as in "rank 3" or "ranks 0 to 14, 16"."""
    ranges = []
    # In consecutive ranks, the difference between rank and index is constant.
    for _, group in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0]):
        found = [rank for _, rank in group]
        ranges += [f"{found[0]} to {found[-1]}"] if len(found) > 2 else map(str, found)
    shown = ", ".join(ranges[:_MOST_SHOWN])
    if len(ranges) > _MOST_SHOWN:
        shown += f" and others, {len(ranks)} in total"
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def code_checksum(package: pathlib.Path = _PACKAGE) -> str:
    """Return a SHA-256 of the package's Python code, C++ sources and MPI rules.

    It does not depend on the configs, which only a wheel has in this directory.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package)
        # Emacs creates broken symlinks.
        if path.suffix in _SOURCES and name.parts[0] != "configs" and path.is_file():
            digest.update(str(name).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def platform_facts() -> dict[str, Any]:
    """Return the facts about software and devices that must be equal on all ranks.

    The instruction set of the CPU may differ: it may change the results, but not the graph.
    """
    import tensorflow as tf

    from lm import kernels

    return {
        "tensorflow": tf.__version__,
        "horovod": package_version("horovod"),
        # The graphs of ranks with and without compiled ops have different exchanges.
        "compiled_ops": kernels.available(),
        "device": "GPU" if tf.config.list_physical_devices("GPU") else "CPU",
    }


def graph_facts() -> dict[str, Any]:
    """Return the facts about the current graph that must be equal on all ranks.

    If the name of an exchange differed, the ranks would wait forever. If the order of the variables
    differed, for example by the order of a Python set, sums over the variables would differ.
    """
    import tensorflow.compat.v1 as tf

    variables = {
        f"variable {index} in the order of creation": [variable.op.name, variable.shape.as_list()]
        for index, variable in enumerate(tf.global_variables())
    }
    graph = tf.get_default_graph().as_graph_def()
    nodes = [*graph.node, *(node for body in graph.library.function for node in body.node_def)]
    exchanges = {
        f"exchange {node.attr['tensor_name'].s.decode() or node.name}": node.op
        for node in nodes
        if node.op.startswith("Horovod")
    }
    return {**variables, **exchanges}
