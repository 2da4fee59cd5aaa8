"""`lm.report` and compare_baseline.sh as a user runs them."""

import html
import math
import re
import shutil

import pytest

from lm import kernels
from tests import fork_server
from tests.commands import environment, run_command, run_module
from tests.unit.report.runs import write_run


def test_the_report_of_one_run_has_one_table_and_its_curves(trained, tmp_path):
    run, here = tmp_path / "_é$\\frac$|", tmp_path / "here"
    shutil.copytree(trained, run)
    here.mkdir()
    result = run_module(
        "lm.report", run, "--noexamples", "--html", tmp_path / "out/report.html", cwd=here,
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


def test_a_page_shows_the_surprisal_of_text_and_a_sample(trained, tmp_path):
    """Licensed text is only shown when the user asks for it."""
    run, page = tmp_path / "run", tmp_path / "report.html"
    shutil.copytree(trained, run)
    record = (run / "run.json").read_text()
    assert '"kind": "embedded"' in record
    (run / "run.json").write_text(record.replace('"kind": "embedded"', '"kind": "ptb"'))
    for flags, count in (([], 0), (["--examples"], 300)):
        result = run_module("lm.report", run, "--html", page, *flags)
        assert result.returncode == 0 and "no examples" not in result.stderr
        assert page.read_text().count(" bits\n") == count
        assert page.read_text().count("<h2>Sample of ") == 1
    assert "the page contains licensed text of PTB: do not publish it" in result.stderr


def test_scored_texts_have_a_page(trained, tmp_path, corpora):
    text = "".join((corpora / "embedded/test.txt").read_text().splitlines(keepends=True)[:3])
    path = tmp_path / "score.html"
    flags = ["--run", trained, "--per_word", "--html", path]
    command = [*fork_server.python(), "-m", "lm.score", *flags]
    result = run_command(command, environment(), 60, input=text)
    assert result.returncode == 0, result.stderr
    log_probs = " ".join(line.split("\t")[4] for line in result.stdout.splitlines()).split()
    page = html.unescape(path.read_text())
    bits = re.findall(r'data-tip="([\d.]+) bits', page)
    expected = [-float(each) / math.log(2) for each in log_probs]
    assert [*map(float, bits)] == pytest.approx(expected, abs=0.01)
    assert "".join(re.findall(r">([^<>]*)</span>", page)) == text


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
    (tmp_path / "runs/d").symlink_to("a")  # the next job of a run under PBS
    result = run_module("lm.report", "gone", "runs", cwd=tmp_path)
    assert result.returncode == 2 and result.stdout.count("| runs/") == 4
    first, last = result.stderr.splitlines()
    assert "gone is not a run" in first and last.startswith("lm: error: runs/b/run.json is corrupt")


@pytest.mark.soak
def test_compare_baseline_trains_twice_and_reports(project, tmp_path, corpora):
    script = project / "run_scripts/compare_baseline.sh"
    flags = ["--hidden_size", 16, "--max_steps", 60, "--data_path", corpora]
    env = environment(NP="2", OUTPUT_DIR=str(tmp_path / "out"))
    result = run_command([script, "config_test", *flags], env, timeout=240)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "-rank (1 rank) and" in line]
    found = "bitwise identical" if kernels.available() else "the first differ"
    assert re.search(rf"\(1 rank\) and \S+ \(2 ranks\): {found}", line)
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {
        "1-rank", "ranks", "report.html", "learning_curves.png", "learning_curves.pdf"
    }  # fmt: skip
