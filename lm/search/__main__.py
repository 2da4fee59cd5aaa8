"""Search hyperparameters: `python -m lm.search --config config_small --space ...`."""

import contextlib
import dataclasses

from lm.cli import program
from lm.errors import needs_extra
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
    resume: bool = option(False, "resume the search in --output_dir, or start it if it is missing")


def main() -> None:
    """Run the command line."""
    program.run_alone(_search)


def _search(argv):
    from lm.cli.flags import parse
    from lm.config import Config, RunOptions
    from lm.search.options import SearchOptions

    for_trials = may_change(RunOptions, "search")
    leave_out = {field.name for field in dataclasses.fields(RunOptions)} - for_trials
    arguments = parse(
        argv, USAGE, SearchDirectory, SearchOptions, Config, RunOptions, leave_out=leave_out
    )
    where = arguments[SearchDirectory]
    config, options, run = map(arguments.given.get, (Config, SearchOptions, RunOptions))
    run = {name: run[name] for name in run.keys() & for_trials}
    with contextlib.ExitStack() as stack, needs_extra("search"):
        from lm.distributed.signals import Signals
        from lm.search.driver import Driver
        from lm.search.study import Given, open_search

        given = Given(where.config, config, options, run)
        search = open_search(where.output_dir, where.resume, given, stack)
        Driver(search, stack.enter_context(contextlib.closing(Signals()))).run()


if __name__ == "__main__":
    main()
