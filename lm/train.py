"""Train a language model, in one process or under mpirun in several.

  python -m lm.train --config config_small
  mpirun -np 2 -H host1:1,host2:1 python -m lm.train --config config_small

A flag overrides the config field of the same name.
"""

import os

from lm.cli import program
from lm.cli.flags import ConfigChoice, parse
from lm.config import Config, RunOptions
from lm.distributed.launch import launched_rank
from lm.errors import UserError
from lm.system import import_tensorflow


def main() -> None:
    program.run(parse_flags, _train)


def parse_flags(argv):
    """Return the config, the options and the network functions for `lm.training.run.train`."""
    arguments = parse(argv, __doc__, ConfigChoice, Config, RunOptions)
    options = arguments[RunOptions]
    if options.timeline:  # Horovod reads the variable when the ranks connect.
        if launched_rank() == 0:
            _check_timeline(options.timeline)
        os.environ["HOROVOD_TIMELINE"] = options.timeline
    return arguments[Config], options, arguments.config_file.functions


def _check_timeline(path):
    directory = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(directory, os.W_OK):
        # Horovod would not report the error, and would write nothing.
        raise UserError(
            f"--timeline {path} cannot be written: it must be a file in a directory that exists"
            " before the run starts"
        )


def _train(parsed, comm, supervisor):
    import_tensorflow()
    from lm.training.run import train

    config, options, functions = parsed
    train(config, options, comm, functions, supervisor)


if __name__ == "__main__":
    main()
