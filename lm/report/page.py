"""A report as a self-contained HTML page without scripts: the text of the console, and images."""

import base64
import html
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lm import logger
from lm.errors import UserError
from lm.files import write_atomically
from lm.report.comparison import Section
from lm.report.tables import build_tokenizer_tables, section_text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 75rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
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
    names, parts = [], []
    for section, png in zip(sections, curves_pngs):
        parts += [text_html(section_text(section)), image_html(png) if png else ""]
        for group in section.groups:
            names += [run.name for run in group.runs]
            parts.append(details_html(f"Config of {group.label}", group.runs[0].record.config))
            starts = {run.name: run.start for run in group.runs}
            parts.append(details_html(f"Machines and versions of {group.label}", starts))
    parts += [text_html(table.text) for table in build_tokenizer_tables(sections)]
    return page_html(f"Runs compared: {', '.join(names)}", parts)


def page_html(title: str, parts: Sequence[str]) -> str:
    """Return a page. The title is plain text, and the parts are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def text_html(text: str) -> str:
    """Return a text with tables, as on the console."""
    return f"<pre>{html.escape(text)}</pre>"


def image_html(png: bytes) -> str:
    """Return an embedded image of learning curves."""
    data = base64.b64encode(png).decode()
    return f'<img alt="Learning curves"\n src="data:image/png;base64,{data}">'


def details_html(title: str, values: Mapping[str, Any]) -> str:
    """Return a collapsible list of names and values."""
    text = text_html("\n".join(f"{name} = {value!r}" for name, value in values.items()))
    return f"<details><summary>{html.escape(title)}</summary>{text}</details>"
