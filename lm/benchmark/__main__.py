"""Measure training: `python -m lm.benchmark step|scaling|exchange|advise --help`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from lm.benchmark import options
from lm.cli import program
from lm.cli.flags import HelpRequested
from lm.config import Config
from lm.distributed.communicator import Communicator
from lm.errors import UserError

_COMMANDS = {
    "step": options.StepOptions,
    "scaling": options.ScalingOptions,
    "exchange": options.ExchangeOptions,
    "advise": options.AdviceOptions,
}


class _Job(NamedTuple):
    run: Callable[[Config, options.Options], None]
    config: Config
    chosen: options.Options

    def facts(self) -> dict[str, Any]:
        """Return what ranks must agree on; there is one."""
        return {}


def _prepare(argv: Sequence[str], comm: Communicator) -> _Job:
    if comm.size > 1:
        raise UserError("start lm.benchmark once, without mpirun: it launches the ranks itself")
    usage = "\n".join(
        ["Measure training.", "", "  python -m lm.benchmark COMMAND [--help] [--flags]", ""]
        + [f"  {name:10} {kind.__doc__.splitlines()[0]}" for name, kind in _COMMANDS.items()]
    )
    command = argv[1] if len(argv) > 1 else "--help"
    if command in ("--help", "-h", "help"):
        raise HelpRequested(usage)
    if command not in _COMMANDS:
        raise UserError(f"{command!r} is not one of the commands {', '.join(_COMMANDS)}")
    # Only this one: each brings libraries that the others do without.
    module = importlib.import_module(f"lm.benchmark.{command}")
    return _Job(module.run, *options.parse(argv[1:], _COMMANDS[command]))


def _work(job: _Job, comm: Communicator) -> None:
    job.run(job.config, job.chosen)


if __name__ == "__main__":
    program.run(_prepare, _work)
