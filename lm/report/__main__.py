"""Runs side by side: `python -m lm.report RUN [RUN ...] [--html FILE]`.

Prints Markdown tables: the results of each config as published tables have them, "config |
epochs | train | valid | test | time/epoch" with a column for each number of ranks; the speed,
speed-up over one rank and efficiency of each run; how far the loss curves of runs of the same
config are apart, and whether their numbers are equal, bit for bit, or which is the first that
differs. Runs on different corpora or vocabularies, whose perplexities cannot be compared, get
tables and curves of their own. --html writes the same as a page and, beside it,
learning_curves.png and .pdf (with several corpora: learning_curves-1, learning_curves-2, ...).
A run that is still going on, or was stopped, is shown as far as it got.

`python -m lm.report SEARCH [--html FILE]`, with the directory of an lm.search, prints its best
trials and all; --html adds Optuna's plots and the best trials' learning curves.
"""

import dataclasses
import os
import signal

from lm import run_files
from lm.cli import program
from lm.cli.flags import parse
from lm.errors import UserError
from lm.options import Checked, option

USAGE = """\
Compare runs: results, speed, loss curves, and whether their numbers are equal bit for bit.

  python -m lm.report runs/small
  python -m lm.report runs/one_rank runs/two_ranks --html report.html

Or show a search:

  python -m lm.report searches/a --html search.html"""


@dataclasses.dataclass(frozen=True)
class ReportOptions(Checked):
    """The files to write."""

    html: str | None = option(
        None, "write the whole report to this file, as one page", is_path=True
    )
    curves: str | None = option(
        None,
        "write the learning curves to this name with .png and .pdf (default: learning_curves beside"
        " the page, none without --html)",
        is_path=True,
    )


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it ends other tools
    program.run_alone(_report)


def _report(argv):
    from lm.report.comparison import group_by_corpus
    from lm.report.metrics import read_run
    from lm.report.page import build_page, write_page
    from lm.report.tables import section_text

    arguments = parse(argv, USAGE, ReportOptions, positional=True)
    directories, options = arguments.positional, arguments[ReportOptions]
    if not directories:
        raise UserError("no run to report on: give one or more directories (see --help)")
    if os.path.exists(os.path.join(directories[0], run_files.SEARCH)):
        if options.curves:
            raise UserError("--curves is of runs: a search's curves are in its page, --html")
        _report_search(directories, options.html)
        return
    sections = group_by_corpus([read_run(directory) for directory in directories])
    for section in sections:
        print(section_text(section))
    page, curves = options.html, options.curves
    if page and curves is None:
        curves = os.path.join(os.path.dirname(page), "learning_curves")
    if not page and not curves:
        return
    from lm.report.curves import draw_sections  # here: matplotlib takes its time

    pngs = draw_sections(sections, curves)
    if page:
        write_page(page, build_page(sections, pngs))


def _report_search(directories, page):
    from lm.report.search import load_search, search_text

    if len(directories) > 1:
        raise UserError(
            f"{directories[0]} is a search, which has a report of its own: give it alone"
        )
    search = load_search(directories[0])
    print(search_text(search))
    if page:
        from lm.report.page import write_page
        from lm.report.search_page import build_search_page

        write_page(page, build_search_page(search))


if __name__ == "__main__":
    main()
