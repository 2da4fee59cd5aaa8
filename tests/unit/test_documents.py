"""The documents name existing files, flags, tests and sections, and show the published results."""

import collections
import functools
import re

import numpy as np
import pytest
from tqdm import tqdm

from lm.flags import flags_document
from lm.report.comparison import compare
from lm.report.metrics import read_run
from lm.report.tables import final_perplexities
from tests.commands import ROOT

CODE = {".py", ".sh", ".sbatch", ".cc", ".h", ".conf"}
FOLDERS = "lm|docs|configs|tests|run_scripts"
KINDS = "py|sh|sbatch|cc|h|conf|md|png"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "data/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_the_document_of_the_flags_is_current():
    message = "run: python -m lm.flags > docs/flags.md"
    assert (ROOT / "docs/flags.md").read_text() == flags_document(), message


def test_link_targets_exist():
    for document in DOCUMENTS:
        text = document.read_text()
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
            path = document.parent / target if target else document
            assert path.exists(), f"{document.name}: {target}"
            assert not anchor or anchor in _anchors(path), f"{document.name}: {target}#{anchor}"


def _anchors(path):
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in _titles(path)}


def _titles(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.*)", prose, flags=re.MULTILINE)


def test_titles_are_unique_in_each_document():
    for document in DOCUMENTS:
        titles = _titles(document)
        assert len(titles) == len(set(titles)), f"{document.name}: {titles}"


def test_named_files_exist():
    code = [p for d in ("lm", "tests", "configs", "run_scripts") for p in (ROOT / d).rglob("*.*")]
    for path in [*DOCUMENTS, *(p for p in code if p.suffix in CODE)]:
        for name in re.findall(rf"\b(?:{FOLDERS})/[\w./-]+\.(?:{KINDS})\b", path.read_text()):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {name}"


def test_imported_names_exist():
    one_line = re.compile(r"^ *from (lm[\w.]*) import (\w+(?:, \w+)*)$", re.MULTILINE)
    paths = [*DOCUMENTS, *(ROOT / "lm").rglob("*.py")]  # many functions import when they run
    imports = {found for path in paths for found in one_line.findall(path.read_text())}
    assert ("lm.tokens.symbols", "Characters") in imports
    for module, names in imports:
        exec(f"from {module} import {names}", {})


def test_named_tests_exist():
    text = (ROOT / "docs/reliability.md").read_text()
    found = re.findall(r"`((?:tests/)?[\w/]+(?:\.py)?) -k \"?(\w+(?: or \w+)*)\"?`", text)
    assert len(found) > 40
    for place, words in found:
        path = ROOT / place if place.startswith("tests/") else ROOT / "tests/faults" / place
        files = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        tests = re.findall(r"^ *def (test_\w+)", "".join(f.read_text() for f in files), re.M)
        for word in words.split(" or "):
            assert any(word in name for name in tests), f"{place} -k {word}"


def test_modules_in_commands_exist():
    for document in DOCUMENTS:
        for module in re.findall(r"python -m (lm[\w.]*)", document.read_text()):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@functools.cache
def published(name):
    return read_run(str(ROOT / "docs/runs" / name))


def rows_of_published_runs(document):
    """Yield each run that a table row links, and the cells of the row by their headers."""
    for table in re.findall(r"(?:^\|.*\|\n)+", document.read_text(), flags=re.MULTILINE):
        header, _, *rows = [
            [cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()
        ]
        for row in rows:
            for name in re.findall(r"\((?:docs/)?runs/([\w-]+)\)", row[0]):
                yield name, dict(zip(header, row))


def expected_cell(run, header):
    """Return the value of a run for a column, or None if the column is not a result."""
    train, valid, test = final_perplexities(run)
    time = tqdm.format_interval(run.clock()[1][-1])
    if header.startswith("valid "):
        seconds = run.seconds_to(float(header.split()[1]))
        return tqdm.format_interval(seconds) if seconds else "-"
    if header.isdigit():  # an epoch
        return f"{run.epochs[int(header) - 1]['valid_perplexity']:.1f}"
    return {
        "precision": run.record.config["precision"],
        "epochs": str(len(run.epochs)),
        "train": f"{train:.2f}", "valid": f"{valid:.2f}", "test": f"{test:.2f}",
        "our valid / test": f"{valid:.2f} / {test:.2f}",
        "end": time, "training time": time,
    }.get(header)  # fmt: skip


@pytest.mark.parametrize("document", ["README.md", "docs/results.md"])
def test_tables_show_the_numbers_of_the_published_runs(document):
    shown = collections.Counter()
    for name, row in rows_of_published_runs(ROOT / document):
        run = published(name)
        measured = sum(epoch["epoch_seconds"] for epoch in run.epochs)
        assert run.clock()[1][-1] == pytest.approx(measured, rel=0.002)
        for header, cell in row.items():
            expected = expected_cell(run, header)
            assert expected in (None, cell), f"{document}: {name}: {header}"
            shown[name] += expected is not None
    missing = {path.name for path in (ROOT / "docs/runs").iterdir()} - shown.keys()
    assert not missing or document == "README.md"  # which shows only the main runs
    assert min(shown.values()) > 1


def test_the_table_of_seeds_shows_the_means_of_the_published_runs():
    text = re.search(r"## Several seeds\n.*?\n## ", (ROOT / "docs/results.md").read_text(), re.S)[0]
    rows = [
        line[2:-2].split(" | ") for line in text.splitlines() if re.match(r"\| (small|med)", line)
    ]
    everything = [read_run(str(path.parent)) for path in (ROOT / "docs").glob("*/*/run.json")]
    for name, precision, num_seeds, *cells in rows:
        runs = [
            run
            for run in everything
            if (run.record.config["name"], run.record.config["precision"]) == (name, precision)
        ]
        by_seed = {run.record.config["seed"]: final_perplexities(run)[1:] for run in runs}
        values = zip(*by_seed.values())
        expected = [f"{np.mean(each):.2f} ± {np.std(each, ddof=1):.2f}" for each in values]
        assert [num_seeds, *cells] == [str(len(by_seed)), *expected]
    assert len(rows) == 3


def test_the_published_runs_on_one_and_two_ranks_are_identical():
    assert compare(published("small-1"), published("small-2")) == "bitwise identical in 315 events"
