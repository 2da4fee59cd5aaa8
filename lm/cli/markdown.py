"""Text tables."""

import math
import re
from collections.abc import Sequence

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


def epochs_text(epochs: float) -> str:
    """Return "2" or "1.99". A part of an epoch is never rounded to a whole."""
    if epochs % 1 == 0:
        return f"{epochs:.0f}"
    return f"{max(math.floor(100 * epochs + 1e-9), 1) / 100:.2f}"
