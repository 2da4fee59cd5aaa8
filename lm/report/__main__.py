"""Runs side by side: `python -m lm.report RUN [RUN ...] [--html FILE]`.

Prints Markdown tables: the results of each config as published tables have them, "config |
epochs | train | valid | test | time/epoch" with a column for each number of ranks; each run's
speed, speed-up over one rank and efficiency; and the largest difference of the loss curves of
runs of the same config. Runs on different corpora or vocabularies, whose perplexities do not
compare, get tables and curves of their own. With --html it writes the whole as a page and beside
it, as learning_curves.png and .pdf, the learning curves: train and validation perplexity against
epoch and against training time. (With several corpora: learning_curves-1, learning_curves-2, ...)
Runs that still go on, or were stopped, are shown as far as they are.
"""

import signal

from lm.cli import program as launch

USAGE = """\
Compare runs: results, speed, loss curves.

  python -m lm.report runs/small
  python -m lm.report runs/one_rank runs/two_ranks --html report.html"""


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it ends other tools
    launch.run_alone(_report)


def _report(argv):
    from lm.cli.flags import Flags
    from lm.report.job import run_report

    flags = Flags(USAGE)
    flags.define(str, "html", None, "write the whole report to this file, one page")
    flags.define(
        str, "curves", None, "write the curves to this name with .png and .pdf; '' for none"
        " (default: learning_curves beside the page, none without --html)",
    )  # fmt: skip
    directories = flags.parse(argv, positional=True)
    run_report(directories, html_file=flags["html"], curves=flags["curves"])


if __name__ == "__main__":
    main()
