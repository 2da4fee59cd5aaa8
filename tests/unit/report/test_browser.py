"""Pages in a real browser: they draw their plots, run no other script, and make no request."""

import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
from playwright.sync_api import sync_playwright

from lm.record import CorpusRecord
from tests.commands import ROOT, environment, run_module
from tests.unit.report.runs import CONFIG, write_run, write_search

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror=alert(1)>'\"</script><script>alert(2)</script>{{7*7}}%{x}"
LOSSES = [(step, 6.0 - step / 10) for step in range(1, 10)]

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt install chromium"),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Return a function that opens a file and waits for its plots; check all opened pages."""
    pages, problems, requests = [], [], []

    def open_page(path, width=1280):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-drawn]")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= page.viewport_size["width"]  # nothing must be scrolled sideways
        page.close()
    assert problems == [] and {url.partition(":")[0] for url in requests} == {"file"}


def report(*paths):
    page = pathlib.Path(paths[0]).parent / "out/report.html"
    result = run_module("lm.report", *paths, "--html", page)
    assert result.returncode == 0, result.stderr
    return page


def trace_points(page, plot):
    """Return the number of points of each visible trace of a plot."""
    return page.evaluate(
        "plot => document.querySelectorAll('.plot')[plot].data.filter(trace => trace.visible)"
        ".map(trace => trace.x.length)",
        plot,
    )


def test_a_page_of_runs_draws_steps_and_keeps_its_state(tmp_path, open_page):
    hostile = {**CONFIG, "name": HOSTILE}
    corpus = CorpusRecord(HOSTILE, HOSTILE, "0" * 64)
    for name, config in (("a", CONFIG), (HOSTILE.replace("/", "|"), hostile)):
        write_run(tmp_path / "runs" / name, losses=LOSSES, config=config, corpus=corpus)
    (tmp_path / "runs/a/checkpoints/step-00000005").mkdir(parents=True)
    page = open_page(report(tmp_path / "runs", "--noexamples"), width=390)
    # Each run has its raw and smoothed losses and validations. The second run has a checkpoint.
    assert trace_points(page, 0) == [9, 9, 2, 9, 9, 2, 1]
    assert page.locator("td.unusual").all_text_contents() == ["small"]
    page.locator(".run").first.uncheck()
    page.locator("select.x").select_option("tokens")
    assert trace_points(page, 0) == [9, 9, 2, 1]
    tokens = page.evaluate("document.querySelector('.plot').data[0].x")
    assert tokens == [100 * step for step in range(1, 10)]
    page.evaluate("Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [200, 500]})")
    page.reload()
    page.wait_for_selector("body[data-drawn]")
    assert trace_points(page, 0) == [9, 9, 2, 1]
    assert page.evaluate("document.querySelector('.plot').layout.xaxis.range") == [200, 500]
    # The second table has a row per run. A click on the header sorts.
    heads = page.locator("h3:text-is('Runs') + .scroll th")
    names = page.locator("h3:text-is('Runs') + .scroll td:first-child")
    first = names.all_text_contents()
    heads.first.click()
    heads.first.click()
    assert names.all_text_contents() == sorted(first, reverse=True) and len(first) == 2


def test_a_page_of_a_search_has_the_plots_of_optuna(tmp_path, open_page):
    trials = [({"learning_rate": 0.1 * n, "init_scale": 1 / n}, 90.0 + n) for n in range(1, 6)]
    write_search(tmp_path / "search", trials, {"config": HOSTILE})
    search = (tmp_path / "search").rename(tmp_path / HOSTILE.replace("/", "|"))
    page = open_page(report(search))
    titles = page.evaluate("[...document.querySelectorAll('.plot')].map(p => p.report.title)")
    assert titles == [
        "History", "Importance of the settings", "Parallel coordinates", "Slices", "Contours",
        "Loss in nats per token",
    ]  # fmt: skip
    assert "trial 0000: learning_rate 0.1, init_scale 1" in page.locator(".legend").inner_text()


def test_benchmarks_are_drawn(tmp_path, open_page):
    rows = [{"implementation": HOSTILE, "ms_per_step": 2.0, "share_of_gemm_peak": 0.5}]
    speedup = {"value": 1.5, "interval": [1.0, 2.0]}
    scaling = [{"scaling": "strong", "ranks": 2, "speedup": speedup, "seconds_per_step": [1.0]}]
    for kind, name, measured in (("step", "implementations", rows), ("scaling", "rows", scaling)):
        record = {"benchmark": kind, "config": {"name": HOSTILE}, name: measured}
        (tmp_path / f"{kind}.json").write_text(json.dumps(record))
    page = open_page(report(tmp_path / "step.json", tmp_path / "scaling.json"))
    assert page.evaluate("document.querySelectorAll('.plot').length") == 3
    assert "1.5 [1, 2]" in page.locator("table").last.inner_text()


def test_a_page_follows_a_training_run(tmp_path, open_page):
    write_run(tmp_path / "run", losses=LOSSES)
    out, metrics = tmp_path / "out.html", tmp_path / "run/metrics.jsonl"
    code = "import lm.report.__main__ as report; report._RELOAD_SECONDS = 2; report.main()"
    command = [sys.executable, "-c", code, tmp_path / "run", "--html", out, "--watch"]
    with (
        subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL) as job,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(job.kill)  # before the end of Popen, which waits for the job
        while not out.exists():
            assert job.poll() is None
            time.sleep(0.05)
        page = open_page(out)
        events = {"event": "step", "step": 16, "loss": 1.0}, {"event": "end", "outcome": "finished"}
        with open(metrics, "a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)
        # The page reloads itself until the run has ended.
        page.wait_for_function("document.body.dataset.reload === '0'", timeout=60_000)
        assert job.wait(30) == 0
        page.wait_for_selector("body[data-drawn]")
        assert trace_points(page, 0)[0] == 10
