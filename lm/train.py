"""Train a language model, in one process or under mpirun in several.

  python -m lm.train --config config_small
  mpirun -np 2 -H host1:1,host2:1 python -m lm.train --config config_small

A flag overrides the config field of the same name. A run that is resumed without --config keeps its
config. Repeat the other flags, such as --keep_checkpoints and --test_on:

  python -m lm.train --resume --output_dir runs/small --keep_checkpoints 20
"""

import os

from lm.cli import program
from lm.cli.parser import ConfigChoice, parse
from lm.config import Config, RunOptions
from lm.distributed.agreement import from_rank_0, on_all_ranks
from lm.distributed.launch import launched_rank
from lm.errors import UserError
from lm.options import replaced
from lm.record import recorded_config
from lm.tensorflow_import import import_tensorflow


def main() -> None:
    program.run(_parse, _train)


def _parse(argv):
    classes = ConfigChoice, Config, RunOptions
    arguments = parse(argv, __doc__, *classes, find_recorded=_find_recorded)
    options = arguments[RunOptions]
    if options.timeline:
        # Horovod reads the variable when the ranks connect, which also happens after an error.
        os.environ["HOROVOD_TIMELINE"] = options.timeline
        if launched_rank() == 0:
            _check_timeline(options.timeline)
    if not _keeps_config(arguments):
        arguments[Config]  # Report invalid values immediately.
    return arguments


def _check_timeline(path):
    directory = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(directory, os.W_OK):
        # Horovod would not report the error, and would write nothing.
        raise UserError(
            f"--timeline {path} cannot be written: it must be a file in a directory that exists"
            " before the run starts"
        )


def _keeps_config(arguments):
    """Return whether the config of the run in --output_dir replaces the default of --config."""
    options = arguments[RunOptions]
    return options.resume and options.output_dir and not arguments.given[ConfigChoice]


def _find_recorded(arguments):
    return recorded_config(arguments[RunOptions].output_dir) if _keeps_config(arguments) else None


def _train(arguments, comm, supervisor):
    import_tensorflow()
    from lm.training.run import train

    # The other hosts may not see the directory of rank 0.
    kept = from_rank_0(comm, lambda: _find_recorded(arguments))
    with on_all_ranks(comm):
        if kept is None:
            config = arguments[Config]
        else:
            config = replaced(Config(**kept), **arguments.given[Config])
        config.check_used(arguments.given[Config], arguments.config_file.config)
    train(config, arguments[RunOptions], comm, arguments.config_file.functions, supervisor)


if __name__ == "__main__":
    main()
