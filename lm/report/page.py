"""A report as an HTML page: one file that works offline, without requests."""

import base64
import dataclasses
import gzip
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import plotly.offline
from markupsafe import Markup

from lm.errors import UserError, printable
from lm.files import write_atomically
from lm.report.tables import Table

_FILES = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a page. Everything except `title` may be missing."""

    title: str
    texts: Sequence[str] = ()
    runs: Sequence[Mapping[str, Any]] = ()  # the runs that the plots show, for the legend
    plots: Sequence[Mapping[str, Any]] = ()
    plots_note: str = ""
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()  # tables that the reader opens
    tokens: Sequence[Mapping[str, Any]] = ()  # see `lm.report.examples`
    code: str = ""  # a command or a text in which spaces matter


def build_page(title: str, parts: Sequence[Part], reload_seconds: int = 0) -> bytes:
    """Return a page, which reloads itself unless `reload_seconds` is 0.

    All texts are plain text, which the template escapes.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FILES), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=_printable,
    )  # fmt: skip
    plots = [plot for part in parts for plot in part.plots]
    page = environment.get_template("page.html").render(
        title=title,
        parts=parts,
        reload_seconds=reload_seconds,
        style=_file("page.css"),
        script=_file("page.js"),
        # JSON has no NaN, and surrogates of file names are not UTF-8.
        plots=_packed(json.dumps(plots, allow_nan=False)) if plots else "",
        library=_packed(plotly.offline.get_plotlyjs()) if plots else "",
    )
    return page.encode()


def write_file(path: str, content: bytes) -> None:
    """Write a file of a report, and create its directory if it is missing."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}); choose a different path with --html"
        ) from error


def _printable(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, kept="\n\t\N{NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}")
    return value


def _file(name: str) -> Markup:
    return Markup((_FILES / name).read_text())


def _packed(text: str) -> Markup:
    """Compress a text. Pages with 4.8 MB of plotly.js would be too large to send."""
    content = gzip.compress(text.encode(), compresslevel=6, mtime=0)
    return Markup(base64.b64encode(content).decode())
