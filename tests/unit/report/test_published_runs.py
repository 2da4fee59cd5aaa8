"""The results in the documents are those of the runs in docs/runs."""

import re

from lm.report.comparison import compare, read_run
from tests.commands import ROOT


def published(name):
    return read_run(str(ROOT / "docs/runs" / name))


def test_the_readme_shows_the_results_of_the_published_runs():
    rows = re.findall(r"^\|.*\(docs/runs/.*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    shown = set()
    for row in rows:
        _, precision, epochs, _, perplexities = [cell.strip() for cell in row.strip("|").split("|")]
        for name in re.findall(r"\(docs/runs/([\w-]+)\)", row):
            run = published(name)
            valid, test = run.tested_epoch["valid_perplexity"], run.test["test_perplexity"]
            assert run.record.config["precision"] == precision
            assert str(len(run.epochs)) == epochs
            assert perplexities == f"{valid:.2f} / {test:.2f}", name
            shown.add(name)
    assert shown == {path.name for path in (ROOT / "docs/runs").iterdir()}


def test_the_published_runs_on_one_and_two_ranks_are_identical():
    assert compare(published("small-1"), published("small-2")) == "bitwise identical in 315 events"
