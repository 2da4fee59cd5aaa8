"""Measure training: `python -m lm.benchmark step|scaling|exchange|advise --help`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence

from lm.benchmark import options, results
from lm.cli import program
from lm.errors import InfoRequested, UserError

_COMMANDS = {
    "step": options.StepOptions,
    "scaling": options.ScalingOptions,
    "exchange": options.ExchangeOptions,
    "advise": options.AdviceOptions,
}


def _run(argv: Sequence[str]) -> None:
    usage = "\n".join(
        ["Measure training.", "", "  python -m lm.benchmark COMMAND [--help] [--flags]", ""]
        + [f"  {name:10} {kind.__doc__.splitlines()[0]}" for name, kind in _COMMANDS.items()]
    )
    command = argv[1] if len(argv) > 1 else "--help"
    if command in ("--help", "-h", "help"):
        raise InfoRequested(usage)
    if command not in _COMMANDS:
        raise UserError(f"{command!r} is not one of the commands {', '.join(_COMMANDS)}")
    # Only this one: each brings libraries that the others do without.
    module = importlib.import_module(f"lm.benchmark.{command}")
    config, chosen = options.parse(argv[1:], _COMMANDS[command])
    facts = results.environment_facts()  # first: the load is to be that of others
    record = {**facts, "benchmark": command, **module.measure(config, chosen)}
    module.show(record)
    # The name of a config may have a directory, which is not one of --out.
    stem = os.path.join(chosen.out, module.STEM.format_map(record).replace("/", "-"))
    results.write_json(stem, record)
    module.draw(stem, record)


if __name__ == "__main__":
    program.run_alone(_run)
