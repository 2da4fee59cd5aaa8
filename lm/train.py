"""Train a language model: `python -m lm.train --config config_small`."""

from lm import launch


def main() -> None:
    """Run the command line on this process, one of one or of many under mpirun."""
    launch.run(_prepare, _train)


def _prepare(argv, comm):
    from lm.job import prepare

    return prepare(argv, comm)


def _train(job, comm):
    from lm.training import train

    train(job, comm)


if __name__ == "__main__":
    main()
