"""`lm.report`, `lm.check` and compare_baseline.sh as a user runs them."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from lm import kernels
from tests.commands import ROOT, environment, mpirun, run_command, run_module

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def browser():
    for name in BROWSERS:
        if shutil.which(name):
            return name
    pytest.skip(f"needs a browser: install one of {', '.join(BROWSERS)}")


def test_a_report_of_one_run_writes_where_it_is_told(trained, tmp_path):
    run, here = tmp_path / "_é$\\frac$|", tmp_path / "here"
    shutil.copytree(trained, run)
    here.mkdir()
    result = run_module(
        "lm.report", run, "--curves", tmp_path / "out/curves", cwd=here,
        env={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Corpus: embedded, 201 words, ")
    assert "| config" in result.stdout and f"{tmp_path}/_é$\\frac$\\|" in result.stdout
    assert (tmp_path / "out/curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out/curves.pdf").read_bytes().startswith(b"%PDF")
    assert list(here.iterdir()) == []


def test_the_page_is_whole_in_a_browser(trained, tmp_path, browser):
    shutil.copytree(trained, tmp_path / "again")
    page, shot = tmp_path / "out/report.html", tmp_path / "shot.png"
    result = run_module("lm.report", trained, tmp_path / "again", "--html", page)
    assert result.returncode == 0, result.stderr
    assert {path.suffix for path in page.parent.iterdir()} == {".html", ".png", ".pdf"}
    (tmp_path / "alone").mkdir()
    moved = page.rename(tmp_path / "alone/report.html")  # away from anything it could lean on
    options = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1600",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]  # fmt: skip
    # What the browser made of it, the size of the drawn image included.
    probe = moved.with_name("probe.html")
    probe.write_text(
        moved.read_text().replace(
            "</body>",
            "<script>document.title = document.images[0].naturalWidth + ' pixels'</script></body>",
        )
    )
    dom = subprocess.run(
        [*options, "--dump-dom", probe.as_uri()], capture_output=True, text=True, timeout=90
    ).stdout
    assert int(re.search(r"<title>(\d+) pixels</title>", dom).group(1)) > 1000
    assert dom.count("<table>") == 3 and "0.00e+00" in dom  # the same run: no difference
    assert (
        "again (1 rank): equal, bit for bit, in 17 events" in dom
        and "in 17 events" in result.stdout
    )
    subprocess.run(
        [*options, f"--screenshot={shot}", moved.as_uri()],
        capture_output=True, timeout=90, check=True,
    )  # fmt: skip
    assert shot.stat().st_size > 20_000  # an empty page has some 5,000 bytes


@pytest.mark.parametrize(
    "arguments, message",
    [([], "no run to report on"), (["nowhere"], "nowhere is not a run"),
     (["x", "--nonsense"], "Unknown command line flag 'nonsense'")],
)  # fmt: skip
def test_bad_input_is_one_line(arguments, message, tmp_path):
    result = run_module("lm.report", *arguments)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("lm: error: ") and message in line


def test_this_machine_is_ready(tmp_path):
    result = run_module("lm.check", "--output_dir", tmp_path, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    names = [line.split()[1] for line in lines[:-1] if not line.startswith(" ")]
    assert names == [
        "mpirun", "versions", "horovod", "same", "ranks", "devices", "kernels", "allreduce",
        "bandwidth", "scaling", "output_dir",
    ]  # fmt: skip
    assert "the sum of ones over the ranks is 2" in result.stdout
    assert lines[-1].startswith("ready: 0 FAIL")


def test_a_wrong_flag_on_one_rank_of_a_check_up_is_told():
    check = [sys.executable, "-m", "lm.check"]
    command = [*mpirun(1), *check, ":", *mpirun(1)[1:], *check, "--typo"]
    result = run_command(command, environment(), timeout=240, cwd=ROOT)
    assert result.returncode == 2
    assert len(re.findall("lm: error: rank 1 on .*typo", result.stderr)) == 1, result.stderr
    assert "Traceback" not in result.stderr


def test_hosts_that_cannot_be_reached_are_a_failure_with_a_remedy():
    result = run_module("lm.check", "--hosts", "host.invalid:1,other.invalid:1")
    assert result.returncode == 1
    assert re.search(r"FAIL  ranks .*\n +-> each host must be reachable", result.stdout)
    assert result.stderr == "lm: error: not ready to train: see the remedies above\n"


@pytest.mark.parametrize("hosts, num_ranks", [("here:1", None), (None, 1)])
def test_a_check_up_of_one_rank_is_refused(hosts, num_ranks):
    check = [sys.executable, "-m", "lm.check", *(["--hosts", hosts] if hosts else [])]
    launcher = mpirun(num_ranks) if num_ranks else []
    result = run_command([*launcher, *check], environment(), timeout=60, cwd=ROOT)
    assert result.returncode == 2 and "a check-up needs two ranks or more" in result.stderr


def test_a_broken_launch_is_told_in_bounded_time(tmp_path):
    """Stands in for hosts that never answer: an mpirun that hangs."""
    (tmp_path / "mpirun").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "mpirun").chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    result = run_module("lm.check", "--timeout_seconds", 2, env=path, timeout=30)
    assert result.returncode == 1 and "no answer within 2 s" in result.stdout


def test_without_mpirun_the_remedy_is_the_set_up(tmp_path):
    result = run_module("lm.check", env={"PATH": str(tmp_path)})
    assert result.returncode == 1
    assert "FAIL  mpirun" in result.stdout and "run_scripts/setup.sh" in result.stdout


def test_compare_baseline_trains_twice_and_reports(project, tmp_path, corpora):
    script = project / "run_scripts/compare_baseline.sh"
    env = environment(
        NP="2", MAX_STEPS="60", DATA_PATH=str(corpora), OUTPUT_DIR=str(tmp_path / "out")
    )
    result = run_command([script, "config_test", "--hidden_size", "16"], env, timeout=240)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\| test +\|.*\|\n", result.stdout)
    row, line = [line for line in result.stdout.splitlines() if "1-rank (1 rank)" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2] == "6" and float(cells[4]) < 1e-4  # one run, any number of ranks
    found = "equal, bit for bit" if kernels.available() else "the first differ"
    assert re.search(rf"\(1 rank\) and \S+ \(2 ranks\): {found}", line)
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {
        "1-rank", "2-ranks", "report.html", "learning_curves.png", "learning_curves.pdf"
    }  # fmt: skip
