"""Pages, curves and tables of runs, from hand-written metrics."""

import dataclasses
import io
import json
import shutil
import signal
import time

import numpy as np
import pytest

from lm.cli.markdown import markdown_table, object_table
from lm.errors import UserError
from lm.inference.generator import Generator
from lm.inference.sampling import Sampling
from lm.inference.trained_run import open_run
from lm.record import CorpusRecord
from lm.report import __main__ as command
from lm.report.benchmarks import read_benchmark
from lm.report.comparison import group_by_corpus
from lm.report.curves import draw_curves, draw_sections
from lm.report.examples import example_parts
from lm.report.metrics import read_run
from lm.report.page import build_page, write_file
from lm.report.plots import build_plots
from lm.report.runs_page import build_parts
from lm.report.search_page import build_search_page
from lm.report.tables import build_tokenizer_tables
from lm.search.study import load_study
from tests.unit.report.runs import CONFIG, write_record, write_run, write_search
from tests.untrained import make_run, rewrite_manifest

SIZES = {"batch_size": 20, "num_steps": 5}


def page_of(runs):
    return build_page("Runs", build_parts(group_by_corpus(runs))).decode()


def test_the_page_is_self_contained(tmp_path):
    config = {**CONFIG, "name": "<script>alert(1)</script>\x1b\u3000"}
    page = page_of([write_run(tmp_path / "a & b", config=config)])
    assert "&lt;/script&gt;\ufffd\u3000" in page
    assert "<script>alert" not in page and "&lt;script&gt;" in page and "a &amp; b" in page
    assert "src=" not in page and "href=" not in page
    with pytest.raises(UserError, match=r"^cannot write /dev/null/x \(File exists\); .* --html$"):
        write_file("/dev/null/x", page.encode())


def test_a_page_that_is_slow_to_write_is_written_less_often(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        raise KeyboardInterrupt(signal.SIGINT)

    monkeypatch.setattr(command, "_RELOAD_SECONDS", 0)
    monkeypatch.setattr(time, "sleep", sleep)
    start = time.monotonic()
    command._watch([str(tmp_path / "run")], str(tmp_path / "out.html"))
    assert len(pauses) == 1 and pauses[0] > 5 * (time.monotonic() - start)


def test_sigterm_ends_a_watch_without_the_last_page(tmp_path, monkeypatch):
    write_run(tmp_path / "run")

    def interrupt(_):
        raise KeyboardInterrupt(signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        command._watch([str(tmp_path / "run")], str(tmp_path / "out.html"))


def test_repeated_trials_do_not_replace_learning_curves(tmp_path):
    directory = tmp_path / "search"
    write_search(directory, [({"learning_rate": n / 10}, 90.0 + n) for n in range(1, 9)])
    for number in range(1, 7):
        shutil.rmtree(directory / f"trials/{number:04d}")
    page = build_search_page(str(directory), load_study(str(directory))).decode()
    assert "trial 0000: learning_rate 0.1" in page and "trial 0007: learning_rate 0.8" in page


def test_benchmarks_of_the_same_config_have_different_names(tmp_path):
    record = {"benchmark": "step", "config": {"name": "small"}, "rows": [{"ms_per_step": 1.0}]}
    for name in ("step-small", "step-small-2"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(record))
        assert read_benchmark(str(path)).name == f"{name}: small"


def test_runs_on_different_corpora_do_not_share_a_table(tmp_path):
    own = CorpusRecord("text", "/own", "12345678" * 8)
    other = dataclasses.replace(own, sha256="9" * 64)  # a different text at the same path
    moved = dataclasses.replace(own, path="/elsewhere")
    runs = [
        write_run(tmp_path / name, ranks=ranks, corpus=corpus, losses=[(1, 6.0)])
        for name, ranks, corpus in [("one", 1, own), ("other", 2, other), ("moved", 2, moved)]
    ]
    sections = group_by_corpus(runs)
    assert [section.corpus for section in sections] == [
        "text, vocabulary of 1,000, /own, SHA-256 12345678",
        "text, vocabulary of 1,000, /own, SHA-256 99999999",
    ]
    assert [len(section.groups[0].runs) for section in sections] == [2, 1]
    page = page_of(runs)
    assert page.count("<h2>Corpus: text, vocabulary of 1,000") == 2
    assert page.count("<button>run</button>") == 4
    assert page.count("<button>speedup</button>") == 1  # only on the same text


def test_runs_with_different_tokenizers_are_compared_on_the_same_text(tmp_path):
    def write(name, text, bits, unknown=0, tokenizer="words"):
        corpus = CorpusRecord("text", "/own", sha256=name, text_sha256=text)
        metrics = {"valid_bits_per_byte": bits, "valid_unknown": unknown}
        return write_run(tmp_path / name, corpus=corpus, metrics=metrics, tokenizer=tokenizer)

    runs = [
        write("words", "text", 1.25),
        write("bpe", "text", 1.125, tokenizer="bpe"),
        write("limited", "text", 1.0, unknown=7),
        write("other", "other text", 1.5),
        write("old", None, 2.0),
        write("older", None, 2.5),
    ]
    sections = group_by_corpus(runs)
    (table,) = build_tokenizer_tables(sections)
    assert [[row[0].rpartition("/")[2], row[1], row[4]] for row in table.rows] == [
        ["bpe", "bpe", "1.1250"],
        ["words", "words", "1.2500"],
        ["limited", "words", "1.0000*"],
    ]
    assert page_of(runs).count("<h2>Tokenizers</h2>") == 1
    assert build_tokenizer_tables(group_by_corpus([runs[0], runs[3]])) == []


def test_the_sample_of_a_run_shows_the_tested_weights(tmp_path, corpora):
    """The last weights are not the best, and only the best weights are tested."""
    for seed, name in enumerate("ab"):
        make_run(tmp_path / name, corpora, seed=seed)
    checkpoints = tmp_path / "a/checkpoints"
    rewrite_manifest(
        checkpoints / "step-00000007", lambda content: content["progress"].update(valid_steps=[7])
    )
    last = (tmp_path / "b/checkpoints/step-00000007").rename(checkpoints / "step-00000009")
    rewrite_manifest(last, lambda content: content["progress"].update(step=9, valid_perplexity=999))
    test = {"event": "test", "step": 9, "test_on": "best"}
    (tmp_path / "a/metrics.jsonl").write_text(json.dumps(test) + "\n")
    sections = group_by_corpus([read_run(str(tmp_path / "a"))])
    *_, sample = example_parts(sections, shows_licensed=False)
    generator = Generator(open_run(str(tmp_path / "a"), "best"))
    (expected,) = generator.generate([""], Sampling(num_words=20, seed=1))
    assert sample.code.startswith(expected.text)


def test_a_page_replaces_a_link(tmp_path):
    """Another user may have created the link, such as in /tmp."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "link").symlink_to("victim")
    write_file(str(tmp_path / "link"), b"page")
    assert (tmp_path / "link").read_text() == "page" and (tmp_path / "victim").read_text() == "mine"


def test_names_are_drawn_as_plain_text(tmp_path):
    names = ["_x", "x$\\frac$y", "a|b", "line\nend", "\udcff"]
    runs = [write_run(tmp_path / name, config={"name": name, **SIZES}) for name in names]
    figure = draw_curves(runs, title="$\\frac$")
    figure.savefig(io.BytesIO(), format="png")
    (legend,) = figure.legends
    shown = [text.get_text().partition("/")[2] for text in legend.get_texts()]
    assert all(name in text for name, text in zip(names[:3], shown))
    page_of(runs)


@pytest.mark.parametrize(
    "speed, times, unit", [(100, [10, 15], "seconds"), (1, [100 / 6, 25], "minutes")]
)
def test_the_time_axis_of_curves_has_a_suitable_unit(tmp_path, speed, times, unit):
    panel = draw_curves([write_run(tmp_path / "a", speed=speed)], title="title").axes[3]
    np.testing.assert_allclose(panel.lines[0].get_xdata(), times, rtol=1e-5)
    assert panel.get_xlabel() == f"training time, {unit}"


def test_runs_without_validation_have_curves(tmp_path):
    write_run(tmp_path / "a")
    path = tmp_path / "a/metrics.jsonl"
    path.write_text(path.read_text().replace("valid_perplexity", "other"))
    sections = group_by_corpus([read_run(str(tmp_path / "a"))])
    draw_sections(sections, str(tmp_path / "curves"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"^cannot write /dev/null/x.png .* --html$"):
        draw_sections(sections, "/dev/null/x")


def test_extreme_and_missing_numbers_have_a_page(tmp_path):
    huge, tiny = 1.7e308, 5e-324
    write_run(tmp_path / "a", losses=[(1, huge), (2, -huge), (3, tiny), (4, 0.0)], speed=1e-300)
    speed = {"tokens_per_second": huge, "valid_perplexity": huge}
    epoch = {"event": "epoch", "epoch": 3, "epochs": 1e28, **speed}
    events = [
        {"event": "step", "step": 10**29, "loss": huge, "tokens_per_second": -huge},
        {**epoch, "step": 10**29, "epoch_seconds": huge, "train_perplexity": tiny},
        {**epoch, "step": 10**29, "epoch_seconds": huge, "valid_perplexity": -5},
        {"event": "test", "step": 10**29, "test_perplexity": huge},
    ]
    with open(tmp_path / "a/metrics.jsonl", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    (tmp_path / "empty").mkdir()
    write_record(tmp_path / "empty")
    (tmp_path / "empty/metrics.jsonl").write_text("")
    runs = [read_run(str(tmp_path / name)) for name in ("a", "empty")]
    assert "1.7e+308" in page_of(runs) and "No run has validated a whole epoch yet" in page_of(
        runs[1:]
    )
    draw_sections(group_by_corpus(runs), str(tmp_path / "curves"))


def test_thinned_lines_keep_their_extremes(tmp_path):
    losses = [(step, 5.0 + step % 7 / 100) for step in range(1, 10_001)]
    losses[4321], losses[8765] = (4322, 90.0), (8766, -1.0)
    (section,) = group_by_corpus([write_run(tmp_path / "a", losses=losses)])
    raw = build_plots(section)[0]["data"][0]
    assert len(raw["x"]) <= 3000 and {90.0, -1.0} <= set(raw["y"])
    assert raw["x"][raw["y"].index(90.0)] == 4322


def test_a_cell_may_contain_a_bar_or_a_line_end():
    table = markdown_table(["name"], [["a|b"], ["a\nb\udcff"]])
    assert table.splitlines()[2:] == ["| a\\|b |", "| a\ufffdb\ufffd |"]


def test_a_table_of_objects_has_all_their_values_except_lists():
    rows = [
        {"name": "a", "speed": 12489.3, "x": [0.1], "ratio": {"value": 1.5, "interval": None}},
        {"name": "b", "share": 0.12345, "ratio": {"value": 1.5, "interval": [1.4, 2.0]}},
    ]
    assert object_table(rows) == (
        ["name", "speed", "ratio", "share"],
        [["a", "12489", "1.5", "-"], ["b", "-", "1.5 [1.4, 2]", "0.1235"]],
    )


def test_markdown_tables_align_numbers_to_the_right():
    assert markdown_table(["name", "x"], [["a", "1.5"], ["long", "-"]]) == (
        "| name |   x |\n| ---- | --: |\n| a    | 1.5 |\n| long |   - |"
    )
