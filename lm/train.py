"""Train a language model: `python -m lm.train --config config_small`."""

from lm.cli import program
from lm.cli.flags import parse_training_flags
from lm.startup import import_tensorflow


def main() -> None:
    """Run the command line on this process, one of one or of many under mpirun."""
    program.run(parse_training_flags, _train, timeline=lambda parsed: bool(parsed[1].timeline))


def _train(parsed, comm):
    import_tensorflow()
    from lm.training.run import train

    config, options, functions = parsed
    train(config, options, comm, functions)


if __name__ == "__main__":
    main()
