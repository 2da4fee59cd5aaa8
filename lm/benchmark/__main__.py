"""Measure training: `python -m lm.benchmark step|scaling|advise --help`."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import socket
import sys
from collections.abc import Sequence
from typing import Any

from lm import files
from lm.benchmark import options
from lm.cli import program
from lm.distributed.devices import count_cores
from lm.errors import InfoRequested, UserError

_COMMANDS = {
    "step": options.StepOptions,
    "scaling": options.ScalingOptions,
    "advise": options.AdviceOptions,
}

logger = logging.getLogger("lm")


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
    config, chosen = options.parse(argv[1:], _COMMANDS[command])
    module = importlib.import_module(f"lm.benchmark.{command}")
    # Read the load average before the first measurement raises it.
    facts = {"benchmark": command, **_environment_facts(), "options": dataclasses.asdict(chosen)}
    facts["config"] = dataclasses.asdict(config)
    record = module.measure(config, chosen)
    module.show(config, chosen, record)
    # A config name may contain a slash, which must not become a directory of --out.
    name = f"{command}-{config.name}-{config.precision}.json".replace("/", "-")
    path = os.path.join(chosen.out, name)
    text = json.dumps({**facts, **record}, default=dataclasses.asdict, indent=2)
    files.write_atomically(path, f"{text}\n".encode())
    logger.info("wrote %s", path)


def _environment_facts() -> dict[str, Any]:
    """Return the facts that a reader needs to repeat a measurement: command, machine, versions."""
    versions = {"python": platform.python_version()}
    for package in ("tensorflow", "tensorflow-cpu", "horovod", "torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {
        "command": " ".join(["python -m lm.benchmark", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "cpu": models[0] if models else platform.machine(),
        "cores": count_cores(),
        # A load above 0 before the start means that other programs used the cores.
        "load_average_before": os.getloadavg()[0],
        "versions": versions,
    }


if __name__ == "__main__":
    program.run_alone(_run)
