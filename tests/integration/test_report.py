"""`lm.report` and compare_baseline.sh as a user runs them."""

import re
import shutil
import subprocess

import pytest

from lm import kernels
from tests.commands import environment, run_command, run_module

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def browser():
    for name in BROWSERS:
        if shutil.which(name):
            return name
    pytest.skip(f"needs a browser: install one of {', '.join(BROWSERS)}")


def test_the_report_of_one_run_has_one_table_and_its_curves(trained, tmp_path):
    run, here = tmp_path / "_é$\\frac$|", tmp_path / "here"
    shutil.copytree(trained, run)
    here.mkdir()
    result = run_module(
        "lm.report", run, "--html", tmp_path / "out/report.html", cwd=here,
        env={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Corpus: embedded, 201 words, ")
    assert result.stdout.count("| run") == 1
    assert "_é$\\frac$|" in (tmp_path / "out/report.html").read_text()
    assert (tmp_path / "out/learning_curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out/learning_curves.pdf").read_bytes().startswith(b"%PDF")
    assert list(here.iterdir()) == []


def test_a_browser_shows_the_whole_page(trained, tmp_path, browser):
    shutil.copytree(trained, tmp_path / "again")
    page, shot = tmp_path / "out/report.html", tmp_path / "shot.png"
    result = run_module("lm.report", trained, tmp_path / "again", "--html", page)
    assert result.returncode == 0, result.stderr
    assert {path.suffix for path in page.parent.iterdir()} == {".html", ".png", ".pdf"}
    (tmp_path / "alone").mkdir()
    moved = page.rename(tmp_path / "alone/report.html")  # the new directory has no other files
    options = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1600",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]  # fmt: skip
    # The browser reports the size of the image.
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
    assert dom.count("| config") == dom.count("| run ") == 1
    assert (
        "again (1 rank): bitwise identical in 17 events" in dom and "in 17 events" in result.stdout
    )
    subprocess.run(
        [*options, f"--screenshot={shot}", moved.as_uri()],
        capture_output=True, timeout=90, check=True,
    )  # fmt: skip
    assert shot.stat().st_size > 20_000  # an empty page has some 5,000 bytes


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
