"""Pages, curves and tables of runs, from hand-written metrics."""

import dataclasses
import io

import pytest

from lm.cli.markdown import markdown_table
from lm.errors import UserError
from lm.record import CorpusRecord
from lm.report.comparison import Group, group_by_corpus, read_run
from lm.report.curves import curves_of, draw_curves, draw_sections
from lm.report.page import build_page, write_file
from lm.report.tables import build_tokenizer_tables
from tests.unit.report.runs import CONFIG, write_run


def test_the_page_is_self_contained(tmp_path):
    config = {**CONFIG, "name": "<script>alert(1)</script>"}
    sections = group_by_corpus([write_run(tmp_path / "a & b", config=config)])
    page = build_page(sections, [b"png"])
    assert "<script" not in page and "&lt;script&gt;" in page and "a &amp; b" in page
    assert 'src="data:image/png;base64,cG5n"' in page
    assert "http" not in page and "<link" not in page
    assert build_page(sections, [None]).count("<img") == 0
    with pytest.raises(UserError, match=r"^cannot write /dev/null/x \(File exists\); .* --html$"):
        write_file("/dev/null/x", page.encode())


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
    page = build_page(sections, [b"png", b"png"])
    assert page.count("Corpus: text, vocabulary of 1,000") == page.count("<img") == 2
    assert page.count("| run ") == 4 and page.count("| speedup |") == 1  # only on the same text


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
    assert build_page(sections, [None] * 6).count("Tokenizers") == 1
    assert build_tokenizer_tables(group_by_corpus([runs[0], runs[3]])) == []


def test_a_page_follows_a_link(tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_file(str(tmp_path / "link"), b"page")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "page"


def test_names_are_drawn_as_plain_text(tmp_path):
    names = ["_x", "x$\\frac$y", "a|b"]
    curves = [Group(name, [write_run(tmp_path / str(i))]) for i, name in enumerate(names)]
    figure = draw_curves(curves, title="$\\frac$")
    figure.savefig(io.BytesIO(), format="png")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    sections = group_by_corpus([write_run(tmp_path / "line\nend", config={"name": "\udcff"})])
    build_page(sections, [None]).encode()


def test_identical_runs_share_a_line_by_epoch(tmp_path):
    runs = [write_run(tmp_path / str(ranks), ranks=ranks) for ranks in (1, 2)]
    (section,) = group_by_corpus(runs)
    (curve,) = curves_of(section.groups[0])
    assert curve.runs == runs
    assert curve.label.endswith("/1 (1 rank) solid, " + f"{tmp_path}/2 (2 ranks) dashed")
    by_epoch, by_time = draw_curves([curve], title="").axes[:2]
    assert len(by_epoch.lines) == 1 and len(by_time.lines) == 2
    assert list(by_epoch.lines[0].get_xdata()) == [1, 1.5]


def test_runs_without_validation_have_curves(tmp_path):
    write_run(tmp_path / "a")
    path = tmp_path / "a/metrics.jsonl"
    path.write_text(path.read_text().replace("valid_perplexity", "other"))
    sections = group_by_corpus([read_run(str(tmp_path / "a"))])
    (png,) = draw_sections(sections, str(tmp_path / "curves"))
    assert png == (tmp_path / "curves.png").read_bytes()
    with pytest.raises(UserError, match=r"^cannot write /dev/null/x.png .* --html$"):
        draw_sections(sections, "/dev/null/x")


def test_a_cell_may_contain_a_bar_or_a_line_end():
    table = markdown_table(["name"], [["a|b"], ["a\nb\udcff"]])
    assert table.splitlines()[2:] == ["| a\\|b |", "| a\ufffdb\ufffd |"]


def test_markdown_tables_align_numbers_to_the_right():
    assert markdown_table(["name", "x"], [["a", "1.5"], ["long", "-"]]) == (
        "| name |   x |\n| ---- | --: |\n| a    | 1.5 |\n| long |   - |"
    )
