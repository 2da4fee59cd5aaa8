"""`lm.report` and compare_baseline.sh as a user runs them."""

import re
import shutil

import pytest

from lm import kernels
from tests.commands import environment, run_command, run_module
from tests.unit.report.runs import write_run


def test_the_report_of_one_run_has_one_table_and_its_curves(trained, tmp_path):
    run, here = tmp_path / "_é$\\frac$|", tmp_path / "here"
    shutil.copytree(trained, run)
    here.mkdir()
    result = run_module(
        "lm.report", run, "--html", tmp_path / "out/report.html", cwd=here,
        env={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Corpus: embedded, vocabulary of 201, ")
    assert result.stdout.count("| run") == 2
    assert "| finished | 150 of " in result.stdout
    assert "_é$\\frac$|" in (tmp_path / "out/report.html").read_text()
    assert (tmp_path / "out/learning_curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out/learning_curves.pdf").read_bytes().startswith(b"%PDF")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [([], "no run to report"), (["nowhere"], "nowhere is not a run"),
     (["x", "--nonsense"], "Unknown command line flag 'nonsense'")],
)  # fmt: skip
def test_invalid_input_is_one_line(arguments, message, tmp_path):
    result = run_module("lm.report", *arguments)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("lm: error: ") and message in line


def test_an_unreadable_run_does_not_stop_the_report(tmp_path):
    for name in "abc":
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs/b/run.json").write_text("[]")
    (tmp_path / "runs/other").mkdir()
    result = run_module("lm.report", "gone", "runs", cwd=tmp_path)
    assert result.returncode == 2 and result.stdout.count("| runs/") == 4
    first, last = result.stderr.splitlines()
    assert "gone is not a run" in first and last.startswith("lm: error: runs/b/run.json is corrupt")


def test_compare_baseline_trains_twice_and_reports(project, tmp_path, corpora):
    script = project / "run_scripts/compare_baseline.sh"
    env = environment(
        NP="2", MAX_STEPS="60", DATA_PATH=str(corpora), OUTPUT_DIR=str(tmp_path / "out")
    )
    result = run_command([script, "config_test", "--hidden_size", "16"], env, timeout=240)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "-rank (1 rank) and" in line]
    found = "bitwise identical" if kernels.available() else "the first differ"
    assert re.search(rf"\(1 rank\) and \S+ \(2 ranks\): {found}", line)
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {
        "1-rank", "2-ranks", "report.html", "learning_curves.png", "learning_curves.pdf"
    }  # fmt: skip
