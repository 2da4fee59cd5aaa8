"""Measure training.

  python -m lm.benchmark step       the training step of one process, and other programs
  python -m lm.benchmark trace      the operations of a training step
  python -m lm.benchmark products   the matrix products of the output layer, and oneDNN's
  python -m lm.benchmark scaling    several ranks compared with one rank
  python -m lm.benchmark advise     the predicted speedup of more ranks

The flag --help of each command describes its flags.
"""

import dataclasses
import datetime
import itertools
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from lm import logger
from lm.benchmark import advise, products, scaling, step_time, trace, worker
from lm.benchmark.turns import RepeatedOptions
from lm.benchmark.worker import Options
from lm.cli import parser, program
from lm.cli.markdown import markdown_table, object_table, value_text
from lm.config import Config
from lm.distributed.cores import claim_cores
from lm.errors import UserError
from lm.json_files import write_json
from lm.system import cpu_model

_COMMANDS = {
    "step": (step_time, step_time.StepOptions),
    "trace": (trace, Options),
    "products": (products, Options),
    "scaling": (scaling, scaling.ScalingOptions),
    "advise": (advise, advise.AdviceOptions),
}


def run(argv: Sequence[str]) -> None:
    command = argv[1] if len(argv) > 1 else "--help"
    if command.startswith("-"):
        parser.parse([argv[0], command], __doc__)  # raises for --help and --version
    if command not in _COMMANDS:
        raise UserError(f"{command!r} is not one of the commands {', '.join(_COMMANDS)}")
    config, options = parse(argv[1:], command)
    # Read the load average before the first measurement raises it.
    settings = {"options": dataclasses.asdict(options), "config": dataclasses.asdict(config)}
    facts = {"benchmark": command, **_environment_facts(), **settings}
    measured = _COMMANDS[command][0].measure(config, options)
    record = json.loads(json.dumps(measured, default=dataclasses.asdict))
    is_repeated = isinstance(options, RepeatedOptions)
    repeats = f", {options.repeats} repeats" if is_repeated else ""
    print(
        f"\n{config.name}, {config.precision}, {options.threads} thread(s) per rank, global batch"
        f" {config.batch_size} x {config.num_steps}{repeats}"
    )
    for key, value in record.items():
        if isinstance(value, list):
            print(f"\n{key}\n\n{markdown_table(*object_table(value))}")
        else:
            print(f"{key}: {value_text(value)}")
    # A config name may contain a slash, which must not become a directory of --out.
    name = f"{command}-{config.name}-{config.precision}".replace("/", "-")
    names = (name if i == 1 else f"{name}-{i}" for i in itertools.count(1))
    paths = (os.path.join(options.out, f"{name}.json") for name in names)
    path = next(path for path in paths if not os.path.exists(path))
    write_json(path, {**facts, **record})
    logger.info("wrote %s", path)


def parse(argv: Sequence[str], command: str) -> tuple[Config, Options]:
    """Parse the flags of a command into its config and options, and create the directory --out."""
    module, kind = _COMMANDS[command]
    arguments = parser.parse(argv, module.__doc__, kind, Config)
    config, options, file = arguments[Config], arguments[kind], arguments.config_file
    if not file.functions.is_built_in and command != "step":
        raise UserError(f"{file.path} defines a network, which only `step` can measure")
    options.check(config)
    os.makedirs(options.out, exist_ok=True)  # fail before hours of measurements
    return config, options


def _environment_facts() -> dict[str, Any]:
    """Return the facts that a reader needs to repeat a measurement: command, machine, versions."""
    return {
        "command": shlex.join(["python", "-m", "lm.benchmark", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": claim_cores(),
        # A load above 0 before the start means that other programs used the cores.
        "load_average_before": os.getloadavg()[0],
        "versions": [f"python {platform.python_version()}", *parser.versions().splitlines()],
    }


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        program.run(
            lambda argv: json.loads(argv[2]), lambda tasks, comm, _: worker.work(tasks, comm)
        )
    else:
        program.run_alone(run)


if __name__ == "__main__":
    main()
