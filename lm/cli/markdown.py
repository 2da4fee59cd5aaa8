"""Text tables."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lm.errors import printable


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. Columns with numbers are aligned to the right."""
    rows = [[printable(cell).replace("|", "\\|") for cell in row] for row in rows]
    columns = list(zip(header, *rows))
    widths = [max(map(len, column)) for column in columns]
    to_right = [_is_numeric(column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, to_right)
        ]
        return f"| {' | '.join(aligned)} |"

    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, to_right)]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def _is_numeric(column: Sequence[str]) -> bool:
    """Return whether the cells of a column are numbers, or dashes for missing numbers."""
    return all(re.fullmatch(r"-|-?[\d,.]+(e[+-]?\d+)?%?", cell) for cell in column)


def object_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of a table of JSON objects, without their lists."""
    items = (item for row in rows for item in row.items())
    header = list(dict.fromkeys(name for name, value in items if not isinstance(value, list)))
    return header, [[value_text(row.get(name)) for name in header] for row in rows]


def value_text(value: Any) -> str:
    """Return a JSON value as text. A ratio and its interval become "1.5 [1.4, 1.6]"."""
    if isinstance(value, dict):
        interval = ", ".join(map(value_text, value.get("interval") or ()))
        return value_text(value.get("value")) + (f" [{interval}]" if interval else "")
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)


def epochs_text(epochs: float) -> str:
    """Return "2" or "1.99". A part of an epoch is never rounded to a whole."""
    if epochs % 1 == 0:
        return f"{epochs:.0f}"
    return f"{max(math.floor(100 * epochs + 1e-9), 1) / 100:.2f}"


def perplexity_form(value: float) -> str:
    """Return the format of a perplexity. The perplexities of characters differ by hundredths."""
    return ".2f" if value >= 10 else ".4f"
