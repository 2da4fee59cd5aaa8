"""Compare runs: results, speed, loss curves, and whether their numbers are bitwise equal.

  python -m lm.report runs/small
  python -m lm.report runs/one_rank runs/two_ranks --html report.html
  python -m lm.report runs        # all runs in a directory

Or report a search:

  python -m lm.report searches/a --html search.html
"""

import dataclasses
import itertools
import os
import signal

from lm import logger
from lm.cli import program
from lm.cli.parser import parse
from lm.errors import ProgramExit, UserError, needs_extra
from lm.options import Checked, option
from lm.search.settings import SEARCH_FILE


@dataclasses.dataclass(frozen=True)
class ReportOptions(Checked):
    """The files to write."""

    html: str | None = option(
        None,
        "write a page to this file, and the learning curves of runs to learning_curves.png and .pdf"
        " in the same directory (with several corpora: learning_curves-1, learning_curves-2, ...)",
        is_path=True,
    )


def _report(argv):
    arguments = parse(argv, __doc__, ReportOptions, positional=True)
    directories, path = arguments.positional, arguments[ReportOptions].html
    if not directories:
        raise UserError("no run to report; give one or more run directories (see --help)")
    searches = [d for d in directories if os.path.exists(os.path.join(d, SEARCH_FILE))]
    if searches and len(directories) > 1:
        raise UserError(f"{searches[0]} is a search; report it separately")
    runs, errors = ([], []) if searches else _read_runs(directories)
    page = _report_search(searches[0], path) if searches else _report_runs(runs, path)
    if page:
        from lm.report.page import write_file

        write_file(path, page.encode())
    if errors:
        raise errors[-1]


def _read_runs(directories):
    """Return the readable runs, and the errors of the others. All except the last are logged."""
    from lm.report.comparison import find_runs, read_run

    runs, errors = [], []
    for directory in itertools.chain.from_iterable(map(find_runs, directories)):
        try:
            runs.append(read_run(directory))
        except ProgramExit as error:
            errors.append(error)
    for error in errors[:-1]:
        logger.warning("%s", error)
    return runs, errors


def _report_runs(runs, path):
    from lm.report.comparison import group_by_corpus
    from lm.report.tables import build_tokenizer_tables, section_text

    sections = group_by_corpus(runs)
    for section in sections:
        print(section_text(section))
    for table in build_tokenizer_tables(sections):
        print(table.text)
    if path is None or not runs:
        return None
    with needs_extra("report"):
        from lm.report.curves import draw_sections  # imports matplotlib, which takes time
    from lm.report.page import build_page

    pngs = draw_sections(sections, os.path.join(os.path.dirname(path), "learning_curves"))
    return build_page(sections, pngs)


def _report_search(directory, path):
    with needs_extra("search"):
        from lm.report.search_page import build_search_page, search_text
        from lm.search.study import load_study, storage_errors

    with storage_errors(f"cannot report {directory}"):
        study = load_study(directory)
        print(search_text(directory, study))
        with needs_extra("report"):
            return build_search_page(directory, study) if path else None


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Stop silently when `| head` closes stdout.
    program.run_alone(_report)


if __name__ == "__main__":
    main()
