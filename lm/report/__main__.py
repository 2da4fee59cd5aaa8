"""Compare runs: results, speed, loss curves, and whether their numbers are bitwise equal.

  python -m lm.report runs/small
  python -m lm.report runs/one_rank runs/two_ranks --html report.html
  python -m lm.report runs --html report.html --watch   # all runs in it, while they train

Or report a search, or the files of lm.benchmark:

  python -m lm.report searches/a --html search.html
  python -m lm.report benchmarks/*.json --html benchmarks.html
"""

import dataclasses
import itertools
import os
import signal
import time

from lm import logger
from lm.cli import program
from lm.cli.parser import parse
from lm.errors import ProgramExit, UserError, needs_extra
from lm.options import Checked, option
from lm.search.settings import SEARCH_FILE

_RELOAD_SECONDS = 10  # --watch reloads the page this often


@dataclasses.dataclass(frozen=True)
class ReportOptions(Checked):
    """The files to write."""

    html: str | None = option(
        None,
        "write a page to this file, and the learning curves of runs to learning_curves.png and .pdf"
        " in the same directory (with several corpora: learning_curves-1, learning_curves-2, ...)",
        is_path=True,
    )
    examples: bool | None = option(
        None,
        "show the start of the validation text and a sample of the best run that has a checkpoint"
        " and needs no config file; licensed text (PTB) is only shown with --examples",
    )
    time_to: str | None = option(
        None,
        "print the training time until the validation perplexity of each run was at most each of"
        " these values, such as 120,90",
    )
    watch: bool = option(
        False,
        "write the page every 10 seconds, or less often if this needs more than a second, until all"
        " runs have ended or Ctrl-C is pressed",
    )


def _report(argv):
    arguments = parse(argv, __doc__, ReportOptions, positional=True)
    paths, options = arguments.positional, arguments[ReportOptions]
    if not paths:
        raise UserError("no run to report; give one or more run directories (see --help)")
    perplexities = _perplexities(options.time_to)
    searches = [path for path in paths if os.path.exists(os.path.join(path, SEARCH_FILE))]
    benchmarks = [path for path in paths if path.endswith(".json") and os.path.isfile(path)]
    if searches and len(paths) > 1:
        raise UserError(f"{searches[0]} is a search; report it separately")
    if benchmarks and len(benchmarks) < len(paths):
        raise UserError(f"{benchmarks[0]} is a benchmark; report runs separately")
    if options.watch and (not options.html or searches or benchmarks):
        raise UserError("--watch needs runs and --html")
    if perplexities and (searches or benchmarks):
        raise UserError("--time_to needs runs")
    if searches:
        _report_search(searches[0], options.html)
    elif benchmarks:
        _report_benchmarks(benchmarks, options.html)
    else:
        if options.watch:
            _watch(paths, options.html)
        _report_runs(paths, options.html, options.examples, perplexities)


def _report_runs(paths, path, examples, perplexities):
    from lm.report.comparison import group_by_corpus
    from lm.report.differences import section_text
    from lm.report.tables import build_time_table, build_tokenizer_tables

    runs, errors = _read_runs(paths)
    sections = group_by_corpus(runs)
    for section in sections:
        print(section_text(section))
        if perplexities:
            print(build_time_table(section, perplexities).text)
    for table in build_tokenizer_tables(sections):
        print(table.text)
    for message in [*filter(None, (run.damage for run in runs)), *errors[:-1]]:
        logger.warning("%s", message)
    if path and runs:
        with needs_extra("report"):
            from lm.report.curves import draw_sections  # imports matplotlib, which takes time
            from lm.report.examples import example_parts

        draw_sections(sections, os.path.join(os.path.dirname(path), "learning_curves"))
        parts = [] if examples is False else example_parts(sections, bool(examples))
        _write_runs(sections, path, parts)
        logger.info("wrote %s", path)
    if errors:
        raise errors[-1]


def _perplexities(text):
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise UserError(f"--time_to must be numbers such as 120,90, not {text!r}") from error


def _watch(paths, path):
    """Write the page of runs while they train. The page reloads itself."""
    from lm.report.comparison import group_by_corpus

    logger.info("writing %s until all runs have ended; Ctrl-C writes it a last time", path)
    reported = set()
    try:
        with program.interruptible():
            while True:
                start = time.monotonic()
                runs, errors = _read_runs(paths)  # a run may start later
                for message in dict.fromkeys(map(str, errors)):
                    if message not in reported:
                        logger.warning("%s", message)
                        reported.add(message)
                if all(run.end for run in runs) and not errors:
                    return
                _write_runs(group_by_corpus(runs), path, reload_seconds=_RELOAD_SECONDS)
                # Leave the cores to the training.
                time.sleep(max(_RELOAD_SECONDS, 10 * (time.monotonic() - start)))
    except KeyboardInterrupt as interrupt:
        if interrupt.args != (signal.SIGINT,):  # Ctrl-C writes the page a last time.
            raise


def _read_runs(paths):
    """Return the readable runs, and the errors of the others."""
    from lm.report.metrics import find_runs, read_run

    directories: dict[str, str] = {}
    for directory in itertools.chain.from_iterable(map(find_runs, paths)):
        # A requeued PBS job adds a link to its run.
        directories.setdefault(os.path.realpath(directory), directory)
    runs, errors = [], []
    for directory in directories.values():
        try:
            runs.append(read_run(directory))
        except ProgramExit as error:
            errors.append(error)
    return runs, errors


def _write_runs(sections, path, examples=(), reload_seconds=0):
    with needs_extra("report"):
        from lm.report.page import build_page, write_file
        from lm.report.runs_page import build_parts

    parts = [*build_parts(sections), *examples]
    write_file(path, build_page("Training runs", parts, reload_seconds))


def _report_search(directory, path):
    with needs_extra("search"):
        from lm.report.search_page import build_search_page, search_text
        from lm.search.study import load_study, storage_errors

    with storage_errors(f"cannot report {directory}"):
        study = load_study(directory)
        print(search_text(directory, study))
        if path:
            with needs_extra("report"):
                from lm.report.page import write_file

                page = build_search_page(directory, study)
            write_file(path, page)
            logger.info("wrote %s", path)


def _report_benchmarks(files, path):
    from lm.report.benchmarks import build_plots, build_table, read_benchmark

    benchmarks = [read_benchmark(file) for file in files]
    tables = [build_table(benchmark) for benchmark in benchmarks]
    for table in tables:
        print(table.text)
    if path:
        with needs_extra("report"):
            from lm.report.page import Part, build_page, write_file

        part = Part("Measurements", plots=list(build_plots(benchmarks)), tables=tables)
        write_file(path, build_page("Benchmarks", [part]))
        logger.info("wrote %s", path)


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Stop silently when `| head` closes stdout.
    program.run_alone(_report)


if __name__ == "__main__":
    main()
