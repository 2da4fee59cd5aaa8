"""The documents name existing files, flags, tests and sections, and show the published results."""

import re

from lm.flags import flags_document
from lm.report.comparison import compare
from lm.report.metrics import read_run
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
    assert ("lm.data.symbols", "Characters") in imports
    for module, names in imports:
        exec(f"from {module} import {names}", {})


def test_named_tests_exist():
    text = (ROOT / "docs/reliability.md").read_text()
    found = re.findall(r"`((?:tests/)?[\w/]+(?:\.py)?) -k \"?(\w+(?: or \w+)*)\"?`", text)
    assert len(found) > 50
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
