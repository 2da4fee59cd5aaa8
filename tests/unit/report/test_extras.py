"""Missing optional packages."""

import pytest

from tests.commands import ROOT, run_code
from tests.unit.report.runs import write_run

SEARCH = ["--space", "learning_rate=1|2", "--corpus", "embedded", "--output_dir", "search"]


def run_without(packages, command, arguments, cwd):
    """Run a command as if some packages were not installed."""
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({packages}))\n"
        f"sys.argv = {[command, *arguments]}; runpy.run_module('{command}', run_name='__main__')"
    )
    return run_code(code, cwd=cwd, env={"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    "package, command, arguments, extra",
    [
        ("optuna", "lm.search", SEARCH, "search"),
        ("optuna", "lm.report", ["old"], "search"),
        ("matplotlib", "lm.report", ["run", "--html", "report.html"], "report"),
    ],
)
def test_a_missing_package_is_one_line(tmp_path, package, command, arguments, extra):
    write_run(tmp_path / "run")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/search.json").write_text("{}")
    result = run_without([package], command, arguments, tmp_path)
    message = f"{package} is not installed; run pip install -e '{ROOT}[{extra}]'"
    assert result.stderr == f"lm: error: {message}\n" and result.returncode == 2


def test_the_tables_of_a_run_need_no_extra(tmp_path):
    write_run(tmp_path / "run")
    result = run_without(["matplotlib", "optuna"], "lm.report", ["run"], tmp_path)
    assert result.returncode == 0 and "| config" in result.stdout
