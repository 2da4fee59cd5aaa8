"""Train a language model: `python -m lm.train --config config_small`."""

from lm.cli import program as launch
from lm.cli.flags import parse_training_flags
from lm.distributed.startup import import_tensorflow


def main() -> None:
    """Run the command line on this process, one of one or of many under mpirun."""
    launch.run(_prepare, _train)


def _prepare(argv, comm):
    config, options = parse_training_flags(argv)  # first: help and typing errors come at once
    import_tensorflow()
    from lm.training.job import prepare

    return prepare(config, options, comm)


def _train(job, comm):
    from lm.training.loop import train

    train(job, comm)


if __name__ == "__main__":
    main()
