"""Search hyperparameters: `python -m lm.search --config config_small --space ...`."""

import contextlib

from lm.cli import program
from lm.errors import needs_extra


def _search(argv):
    from lm.search.settings import parse_search

    parsed = parse_search(argv)  # answers --help, even if a package is missing
    with contextlib.ExitStack() as stack, needs_extra("search"):
        from lm.distributed.signals import Signals
        from lm.search.driver import Driver
        from lm.search.study import open_search

        search = open_search(*parsed, stack)
        Driver(search, stack.enter_context(contextlib.closing(Signals()))).run()


def main() -> None:
    program.run_alone(_search)


if __name__ == "__main__":
    main()
