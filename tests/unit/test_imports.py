"""The house: imports go one way, and Horovod is behind one door."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "lm"
# From what knows nothing to what knows all; a module may import only those of lower layers.
LAYERS = [
    ["errors", "metrics", "files", "startup", "tables", "checklist", "sampling"],
    ["config", "vocabulary", "archive", "download", "synthetic", "logs"],
    ["flags", "encoding", "ptb", "batches", "agreement"],
    ["corpus_cache", "corpus", "product", "lstm", "softmax", "tensorboard"],
    ["run_corpus", "comparison", "curves", "report_tables", "report_page"],
    ["model", "optimizer", "session", "distributed", "reporting", "checkpoint", "profiling"],
    ["launch", "evaluation", "job", "inference", "runs"],
    ["train_graph", "validation", "start_report", "texts", "generation", "scoring", "exporting"],
    ["training", "evaluate_job", "report_job", "readiness"],
    ["train", "evaluate", "generate", "score", "export", "report", "check"],
]


def imports_of(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("level", range(len(LAYERS)))
def test_modules_import_only_lower_layers(level):
    higher = {f"lm.{name}" for layer in LAYERS[level + 1 :] for name in layer}
    for name in LAYERS[level]:
        assert not higher.intersection(imports_of(PACKAGE / f"{name}.py")), name


def test_horovod_is_imported_in_one_module_only():
    importers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] == "horovod" for name in imports_of(path))
    }
    assert importers <= {"distributed.py", "benchmark/exchange.py"}
    assert "distributed.py" in importers


@pytest.mark.parametrize(
    "name", ["config", "corpus", "run_corpus", "vocabulary", "batches", "synthetic"]
)
def test_data_modules_do_without_tensorflow(name):
    assert not any(i.split(".")[0] == "tensorflow" for i in imports_of(PACKAGE / f"{name}.py"))
