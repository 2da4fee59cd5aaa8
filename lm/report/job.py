"""The work of `lm.report`: runs to tables, curves and a page."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Optional

from lm.cli.tables import markdown_table
from lm.errors import UserError
from lm.files import write_atomically
from lm.report.comparison import Section, group_by_corpus, read_run
from lm.report.page import build_page
from lm.report.tables import build_tables, num_ranks_text, run_name

logger = logging.getLogger("lm")


def run_report(directories: Sequence[str], html_file: Optional[str], curves: Optional[str]) -> None:
    """Print the tables, and write the curves and the page.

    Args:
      directories: Of the runs.
      html_file: Where the page goes, or None.
      curves: Where the curves go, without .png and .pdf; empty for nowhere, None for beside the
        page, if there is one.

    Raises:
      UserError: A directory holds no run, or there is none.
      OSError: A file cannot be written.
    """
    if not directories:
        raise UserError("no run to report on: give one or more directories (see --help)")
    sections = group_by_corpus([read_run(directory) for directory in directories])
    for section in sections:
        print(f"Corpus: {section.corpus}\n")
        for table in build_tables(section.groups):
            print(f"{table.title}\n\n{markdown_table(table.header, table.rows)}\n\n{table.note}\n")
    if curves is None:
        beside = os.path.join(os.path.dirname(html_file or ""), "learning_curves")
        curves = beside if html_file else ""
    pngs = [
        _draw(section, curves and f"{curves}{suffix}", with_png=html_file is not None)
        for section, suffix in zip(sections, _suffixes(len(sections)))
    ]
    if html_file:
        _make_parent(html_file)
        write_atomically(html_file, build_page(sections, pngs).encode())
        logger.info("wrote %s", html_file)


def _suffixes(count: int) -> list[str]:
    return [""] if count == 1 else [f"-{number}" for number in range(1, count + 1)]


def _draw(section: Section, curves: str, with_png: bool) -> Optional[bytes]:
    runs = [(group, run) for group in section.groups for run in group.runs if run.epochs]
    if not runs:
        logger.info("no run has finished an epoch yet: no learning curves of %s", section.corpus)
    if not runs or not (curves or with_png):
        return None
    try:
        from lm.report.curves import draw_curves, png_bytes, save_curves
    except ImportError as error:
        raise UserError(
            f"the curves need matplotlib ({error}): run run_scripts/setup.sh, or give neither"
            " --html nor --curves"
        ) from error
    labels = [
        f"{run_name(run)} ({group.label}, {num_ranks_text(run.num_ranks)})" for group, run in runs
    ]
    figure = draw_curves([run for _, run in runs], labels, title=section.corpus)
    if curves:
        _make_parent(curves)
        logger.info("wrote %s", " and ".join(save_curves(figure, curves)))
    return png_bytes(figure) if with_png else None


def _make_parent(path: str) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
