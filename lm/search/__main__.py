"""Search hyperparameters: `python -m lm.search --config config_small --space ...`."""

import contextlib
import dataclasses
import os

from lm.cli import program
from lm.errors import UserError, needs_extra
from lm.options import Checked, may_change, option

USAGE = """\
Search hyperparameters. Each trial is a run of lm.train on one or more ranks.

  python -m lm.search --config config_small --trials 40 --ranks_per_trial 2 --parallel_trials 2 \\
      --space "learning_rate=0.3:3:log, keep_prob=0.5:1.0, hidden_size=100|200|300" \\
      --output_dir searches/a
  python -m lm.search --output_dir searches/a --resume
  python -m lm.report searches/a --html report.html

Flags of lm.train apply to all trials. See docs/search.md."""


@dataclasses.dataclass(frozen=True)
class SearchDirectory(Checked):
    """The search to start or to resume."""

    config: str | None = option(
        None,
        "a config in configs/, or the path of a .py file that defines get_config(), and suggest()"
        " unless --space is given (default: config_small)",
        is_path=True,
    )
    output_dir: str = option("", "directory of the search", required=True, is_path=True)
    resume: bool = option(False, "resume the search in --output_dir, or start one if there is none")


def main() -> None:
    """Run the command line."""
    program.run_alone(_search)


def _search(argv):
    from lm.cli.flags import parse
    from lm.config import Config, RunOptions
    from lm.search.options import SearchOptions

    names = {field.name for field in dataclasses.fields(RunOptions)}
    leave_out = names - may_change(RunOptions, "search")
    arguments = parse(
        argv, USAGE, SearchDirectory, SearchOptions, Config, RunOptions, leave_out=leave_out
    )
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        raise UserError("lm.search starts the ranks of its trials; run it without mpirun")
    with contextlib.ExitStack() as stack, needs_extra("search"):
        _run(arguments, stack)


def _run(arguments, stack):
    from lm.config import Config, RunOptions
    from lm.distributed.signals import Signals
    from lm.search.best import report_best
    from lm.search.driver import Driver, resume_command
    from lm.search.options import SearchOptions
    from lm.search.prepare import Given, prepare
    from lm.search.results import best_table
    from lm.search.study import storage_errors

    where = arguments[SearchDirectory]
    config, options, run = map(arguments.given, (Config, SearchOptions, RunOptions))
    run = {name: run[name] for name in run.keys() & may_change(RunOptions, "search")}
    directory, given = where.output_dir, Given(where.config, config, options, run)
    search, study = prepare(directory, where.resume, given, stack)
    signals = stack.enter_context(contextlib.closing(Signals()))
    with storage_errors(f"resume with: {resume_command(directory)}"):
        driver = Driver(directory, search, study, signals)
        driver.run()
        print(best_table(study).text)
        with driver.turn():
            report_best(study, search, directory, driver.raise_if_stopped)


if __name__ == "__main__":
    main()
