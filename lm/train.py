"""Train a language model, in one process or under mpirun in several.

  python -m lm.train --config config_small
  mpirun -np 2 -H host1:1,host2:1 python -m lm.train --config config_small

A flag overrides the config field of the same name.
"""

import dataclasses
import os

from lm.cli import program
from lm.cli.flags import parse
from lm.config import Config, RunOptions
from lm.options import Checked, option
from lm.system import import_tensorflow


@dataclasses.dataclass(frozen=True)
class ConfigChoice(Checked):
    """The flag that selects the config."""

    config: str = option(
        "config_small",
        "a config in configs/, or the path of a .py file that defines get_config(); the file is"
        " executed",
        is_path=True,
    )


def main() -> None:
    program.run(parse_flags, _train)


def parse_flags(argv):
    """Return the config, the options and the network functions for `lm.training.run.train`."""
    arguments = parse(argv, __doc__, ConfigChoice, Config, RunOptions)
    options = arguments[RunOptions]
    if options.timeline:  # Horovod reads the variable when the ranks connect.
        os.environ["HOROVOD_TIMELINE"] = options.timeline
    return arguments[Config], options, arguments.config_file.functions


def _train(parsed, comm):
    import_tensorflow()
    from lm.training.run import train

    config, options, functions = parsed
    train(config, options, comm, functions)


if __name__ == "__main__":
    main()
