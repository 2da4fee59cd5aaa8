"""Search hyper-parameters: `python -m lm.search --config config_small --space ...`."""

import contextlib
import dataclasses
import os

from lm.cli import program
from lm.errors import UserError

USAGE = """\
Search hyper-parameters: each trial is a run of lm.train on one rank or more.

  python -m lm.search --config config_small --trials 40 --ranks_per_trial 2 --parallel_trials 2 \\
      --space "learning_rate=0.3:3:log, keep_prob=0.5:1.0, hidden_size=100|200|300" \\
      --output_dir searches/a
  python -m lm.search --output_dir searches/a --resume
  python -m lm.report searches/a --html report.html

Flags of lm.train hold for all trials. See docs/search.md."""


def main() -> None:
    """Run the command line."""
    program.run_alone(_search)


def _search(argv):
    flags, config_class = _flags(argv)
    flags.parse(argv)
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        raise UserError("lm.search starts the ranks of its trials itself: run it without mpirun")
    with contextlib.ExitStack() as stack:
        _run(flags, config_class, stack)


def _flags(argv):
    from lm.cli.flags import Flags
    from lm.config import Config, RunOptions
    from lm.config_file import load_config_file
    from lm.options import may_change
    from lm.search.options import SearchOptions

    flags = Flags(USAGE)
    flags.define(
        str, "config", None, "a config in configs/, or a path to a .py file with get_config(), and"
        " suggest() where there is no --space (default: config_small)",
    )  # fmt: skip
    flags.define(
        str, "output_dir", None, "directory of the search",
        required="give the directory of the search",
    )  # fmt: skip
    flags.define(
        bool, "resume", False, "go on with the search in --output_dir, or start if there is none"
    )
    name = flags.peek(argv, "config")
    config_class = type(load_config_file(name).config) if name is not None else Config
    flags.define_fields(SearchOptions)
    flags.define_fields(config_class, show_defaults=False)
    names = {field.name for field in dataclasses.fields(RunOptions)}
    flags.define_fields(RunOptions, leave_out=names - may_change(RunOptions, "search"))
    return flags, config_class


def _run(flags, config_class, stack):
    from lm.config import RunOptions
    from lm.distributed.signals import Signals
    from lm.options import may_change
    from lm.report.search import best_table
    from lm.search.driver import Driver, resume_command
    from lm.search.options import SearchOptions
    from lm.search.prepare import Given, prepare
    from lm.search.study import storage_errors
    from lm.search.winner import report_winner

    directory = flags["output_dir"]
    config, options, run = map(flags.given, (config_class, SearchOptions, RunOptions))
    run = {name: run[name] for name in run.keys() & may_change(RunOptions, "search")}
    given = Given(flags["config"], config, options, run)
    search, study = prepare(directory, flags["resume"], given, stack)
    signals = stack.enter_context(contextlib.closing(Signals()))
    with storage_errors(f"go on with: {resume_command(directory)}"):
        driver = Driver(directory, search, study, signals)
        driver.run()
        print(best_table(study.optuna).text)
        report_winner(study, search, directory, driver.stop_if_asked)


if __name__ == "__main__":
    main()
