"""Train a language model: `python -m lm.train --config config_small`."""

import os

from lm.cli import program
from lm.cli.flags import parse_training_flags
from lm.system import import_tensorflow


def main() -> None:
    """Run the command line on this process, which may be one of many under mpirun."""
    program.run(_parse, _train)


def _parse(argv):
    config, options, functions = parse_training_flags(argv)
    if options.timeline:  # Horovod reads it when the ranks connect
        os.environ["HOROVOD_TIMELINE"] = options.timeline
    return config, options, functions


def _train(parsed, comm):
    import_tensorflow()
    from lm.training.run import train

    config, options, functions = parsed
    train(config, options, comm, functions)


if __name__ == "__main__":
    main()
