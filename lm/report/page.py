"""A report as a self-contained HTML page without scripts."""

from __future__ import annotations

import base64
import html
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lm.cli.tables import is_numeric
from lm.errors import UserError
from lm.files import write_atomically
from lm.report.comparison import Group, Section
from lm.report.tables import Table, build_tables, comparison_lines

logger = logging.getLogger("lm")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 75rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.3rem; margin-top: 2.5rem; overflow-wrap: anywhere; }
h3 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; }
th { border-bottom: 2px solid #888; white-space: nowrap; }
.number { text-align: right; }
p.note { color: #666; margin: .3rem 0 .8rem; }
img { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: .7rem; overflow-x: auto; font-size: 13px; }
"""


def write_file(path: str, content: bytes) -> None:
    """Write a file of a report, and create its directory if it is missing."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write_atomically(os.path.realpath(path), content)  # follow a link
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); choose a different path with --html"
        ) from error
    logger.info("wrote %s", path)


def build_page(sections: Sequence[Section], curves_pngs: Sequence[bytes | None]) -> str:
    """Return the page of a comparison of runs, with the learning curves of each section."""
    names = [run.name for section in sections for group in section.groups for run in group.runs]
    parts = []
    for section, png in zip(sections, curves_pngs):
        parts.append(f"<h2>Corpus: {html.escape(section.corpus)}</h2>")
        parts += map(table_html, build_tables(section.groups))
        parts += map(line_html, comparison_lines(section.groups))
        parts += [image_html("Learning curves", png)] if png else []
        parts += map(_settings, section.groups)
    return page_html(f"Runs compared: {', '.join(names)}", parts)


def page_html(title: str, parts: Sequence[str]) -> str:
    """Return a page. The title is plain text, and the parts are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def line_html(text: str) -> str:
    """Return a text as a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def image_html(title: str, png: bytes) -> str:
    """Return an embedded image with a heading."""
    return (
        f'<h3>{html.escape(title)}</h3>\n<img alt="{html.escape(title)}"\n'
        f' src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    )


def details_html(title: str, values: Mapping[str, Any]) -> str:
    """Return a collapsible list of names and values."""
    text = html.escape("\n".join(f"{name} = {value!r}" for name, value in values.items()))
    return f"<details><summary>{html.escape(title)}</summary><pre>{text}</pre></details>"


def table_html(table: Table) -> str:
    """Return a table with its title and note."""
    numeric = [is_numeric(column) for column in zip(*table.rows)] or [False] * len(table.header)

    def row(cells: Sequence[str], tag: str) -> str:
        styled = (
            f"<{tag}{' class=number' * right}>{html.escape(cell)}</{tag}>"
            for cell, right in zip(cells, numeric)
        )
        return f"<tr>{''.join(styled)}</tr>"

    body = "\n".join(row(cells, "td") for cells in table.rows)
    return (
        f'<h3>{html.escape(table.title)}</h3><p class="note">{html.escape(table.note)}</p>\n'
        f'<div class="wide"><table><thead>{row(table.header, "th")}</thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _settings(group: Group) -> str:
    return (
        f"<h3>Settings of {html.escape(group.label)}</h3>"
        + details_html("config", group.runs[0].record.config)
        + details_html("machines and versions", {run.name: run.start for run in group.runs})
    )
