"""The documents say what the code says."""

import pathlib
import re

from lm.cli.flags import flags_document

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_flags_are_documented_as_they_are():
    made = flags_document()
    assert (ROOT / "docs" / "flags.md").read_text() == made, (
        "run: python -m lm.flags > docs/flags.md"
    )


def test_links_and_named_files_exist():
    for document in DOCUMENTS:
        text = document.read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
        for name in re.findall(r"`((?:lm|docs|configs|tests|run_scripts)/[\w./-]+\.\w+)", text):
            assert (ROOT / name).exists(), f"{document.name}: {name}"


def test_modules_that_are_run_exist():
    for document in DOCUMENTS:
        for module in re.findall(r"python -m (lm[\w.]*)", document.read_text()):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
