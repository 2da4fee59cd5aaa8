"""Import directions, and the size and purpose of packages."""

import ast

import pytest

from tests.commands import ROOT, run_code

PACKAGE = ROOT / "lm"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")

BASE = set(
    (
        "logger errors files json_files options config functions gemm_peak record perplexity"
        " schedule system tensorflow_import"
    ).split()
)
# The packages that each part of lm/ may import, in addition to itself and the base.
MAY_IMPORT = {
    **{module: set() for module in BASE},
    "kernels": set(),
    "tokens": set(),
    "data": {"tokens"},
    "events": set(),
    "checkpoint": set(),
    "distributed": {"kernels"},
    "model": {"kernels", "data"},
    "user": {"model"},
    "config_file": {"user"},
    "cli": {"distributed", "events", "user", "config_file"},
    "tf1": {"model", "user"},
    "optimize": {"kernels", "checkpoint", "distributed", "model"},
    "training": set("kernels tokens data events checkpoint distributed model optimize".split()),
    "inference": {"kernels", "tokens", "data", "checkpoint", "distributed", "model", "user"},
    "report": {"checkpoint", "cli", "data", "events", "inference", "search"},
    "search": {"cli", "config_file", "tokens", "data", "checkpoint", "distributed", "events"},
    "check": {"cli", "kernels", "distributed"},
    "benchmark": set("cli kernels data distributed model optimize training config_file".split()),
}
COMMANDS = set(
    "api average train evaluate generate score export synthesize tokenizer flags".split()
)
WITHOUT_TENSORFLOW = {*BASE, *"config_file tokens data report cli search".split()}
# The modules that a newcomer reads in a day; see CONTRIBUTING.md.
SPINE = [
    PACKAGE / name
    for name in (
        "train.py", "training/run.py", "training/prepare.py", "training/loop.py",
        "training/step.py", "optimize/gradients.py", "optimize/optimizer.py",
        "schedule.py", "model/lstm.py", "model/output_layer.py", "model/network.py",
        "model/windows.py", "data/batches.py", "tokens/vocabulary.py", "tokens/tokenizers.py",
        "distributed/communicator.py", "checkpoint/store.py", "checkpoint/progress.py",
        "training/checkpointer.py",
    )
]  # fmt: skip


def part_of(path):
    """Return the name of the package or module in lm/."""
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
    assert part in MAY_IMPORT or part in COMMANDS, f"add {part} to MAY_IMPORT"
    imported = {name.split(".")[1] for name in imports_of(path) if name.startswith("lm.")}
    assert not imported & (COMMANDS - {part}), "no module imports a command"
    if part in MAY_IMPORT:
        assert imported <= MAY_IMPORT[part] | BASE | {part}


@pytest.mark.parametrize("path", SPINE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_spine_is_independent_of_tools_and_user_defined_networks(path):
    imported = {name.split(".")[1] for name in imports_of(path) if name.startswith("lm.")}
    assert not imported & {"user", "inference", "search", "report", "benchmark", "check", "tf1"}


def test_the_spine_is_read_in_a_day():
    num_lines = sum(len(path.read_text().splitlines()) for path in SPINE)
    assert num_lines <= 2800, "move a special case out of the spine, see CONTRIBUTING.md"


def test_packages_are_small():
    for package in {path.parent for path in MODULES} - {PACKAGE}:
        num_modules = len(list(package.glob("[!_]*.py")))
        assert num_modules <= 13, f"divide {package} into packages, see CONTRIBUTING.md"


def test_module_names_are_distinct():
    names = [path.name for path in MODULES if not path.name.startswith("__")]
    assert sorted(names) == sorted(set(names))


def test_each_package_states_its_purpose():
    for package in {path.parent for path in MODULES}:
        assert ast.get_docstring(ast.parse((package / "__init__.py").read_text())), package


def test_only_one_module_imports_horovod():
    importers = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if any(name.split(".")[0] == "horovod" for name in imports_of(path))
    }
    assert importers == {"distributed/horovod.py"}


def test_parsing_and_reports_do_not_import_tensorflow():
    """`--help` and errors in flags appear immediately."""
    without = [path for path in MODULES if part_of(path) in WITHOUT_TENSORFLOW]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in without]
    modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = (
        "import importlib, sys\nsys.modules['tensorflow'] = None\n"
        "for name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    )
    result = run_code(code, *modules)
    assert result.returncode == 0, result.stderr
