"""Measure training: `python -m lm.benchmark step|scaling|exchange|advise --help`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from lm.cli import program
from lm.cli.flags import HelpRequested
from lm.distributed.communicator import Communicator
from lm.errors import UserError

_COMMANDS = {
    "step": "a training step of one process, its share of the GEMM peak, and other programs",
    "scaling": "several ranks against one: strong and weak scaling, and where the time goes",
    "exchange": "latency and bandwidth of the exchange between the ranks",
    "advise": "a prediction of what more ranks will bring, here and on a cluster",
}


class _Job(NamedTuple):
    run: Callable[[Any], None]
    benchmark: Any

    def facts(self) -> dict[str, Any]:
        """Return what ranks must agree on; there is one."""
        return {}


def _prepare(argv: Sequence[str], comm: Communicator) -> _Job:
    if comm.size > 1:
        raise UserError("start lm.benchmark once, without mpirun: it launches the ranks itself")
    usage = "\n".join(
        ["Measure training.", "", "  python -m lm.benchmark COMMAND [--help] [--flags]", ""]
        + [f"  {name:10} {text}" for name, text in _COMMANDS.items()]
    )
    command = argv[1] if len(argv) > 1 else "--help"
    if command in ("--help", "-h", "help"):
        raise HelpRequested(usage)
    if command not in _COMMANDS:
        raise UserError(f"{command!r} is not one of the commands {', '.join(_COMMANDS)}")
    module = importlib.import_module(f"lm.benchmark.{command}")
    return _Job(module.run, module.parse(argv[1:]))


def _work(job: _Job, comm: Communicator) -> None:
    job.run(job.benchmark)


if __name__ == "__main__":
    program.run(_prepare, _work)
