"""The house: imports go one way, and Horovod is behind one door."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "lm"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")

BASE = {
    "errors",
    "files",
    "options",
    "config",
    "config_file",
    "record",
    "run_files",
    "perplexity",
    "system",
}
# What each part of lm/ may import, besides itself and the base.
MAY_IMPORT = {
    "errors": set(),
    "files": set(),
    "options": set(),
    "config": set(),
    "config_file": set(),
    "record": set(),
    "run_files": set(),
    "perplexity": set(),
    "system": set(),
    "kernels": set(),
    "data": set(),
    "events": set(),
    "checkpoint": set(),
    "distributed": {"kernels"},
    "cli": {"distributed", "events"},
    "model": {"kernels", "data"},
    "training": {"kernels", "data", "events", "checkpoint", "distributed", "model"},
    "inference": {"kernels", "data", "checkpoint", "distributed", "model"},
    "report": {"cli", "data"},
    "search": {"cli", "data", "checkpoint", "distributed", "report"},
    "check": {"cli", "kernels", "distributed"},
    "benchmark": {"cli", "kernels", "data", "distributed", "model", "training"},
}
# `lm.report` reports searches too.
EXCEPTIONS = {"report/__main__.py": {"search"}}
COMMANDS = {"train", "evaluate", "generate", "score", "export", "flags"}
WITHOUT_TENSORFLOW = {*BASE, "data", "report", "cli", "search"} - {"system"}


def part_of(path):
    """Return the package in lm/, or the module that stands in lm/ itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    part = part_of(path)
    assert part in MAY_IMPORT or part in COMMANDS, f"{part} has no place in the house"
    imported = {name.split(".")[1] for name in imports_of(path) if name.startswith("lm.")}
    assert not imported & (COMMANDS - {part}), "nothing imports a command"
    if part in MAY_IMPORT:
        exceptions = EXCEPTIONS.get(str(path.relative_to(PACKAGE)), set())
        assert imported <= MAY_IMPORT[part] | BASE | {part} | exceptions


def test_no_package_is_too_large_to_take_in():
    for package in {path.parent for path in MODULES} - {PACKAGE}:
        assert len(list(package.glob("[!_]*.py"))) <= 13, package


def test_each_package_says_what_it_is_for():
    for package in {path.parent for path in MODULES}:
        assert ast.get_docstring(ast.parse((package / "__init__.py").read_text())), package


def test_horovod_is_imported_in_one_module_only():
    importers = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if any(name.split(".")[0] == "horovod" for name in imports_of(path))
    }
    assert importers == {"distributed/horovod.py"}


def test_it_does_without_tensorflow():
    """Also what it imports: `--help` and typing errors take no seconds, a report no TensorFlow."""
    without = [path for path in MODULES if part_of(path) in WITHOUT_TENSORFLOW]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in without]
    modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = (
        "import importlib, sys\nsys.modules['tensorflow'] = None\n"
        "for name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    )
    command = [sys.executable, "-c", code, *modules]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
