"""The report of runs for the console, with their differences: results, settings and machines."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from lm.report.comparison import Group, Section, comparable_sets, compare, identical_sets
from lm.report.metrics import RunMetrics
from lm.report.tables import Table, build_tables, run_title

_MAX_COLUMNS = 12  # columns of a matrix


class Unusual(str):
    """A cell that a page highlights."""

    unusual = True


def section_text(section: Section) -> str:
    """Return the report of a section for the console."""
    tables = [table.text for table in build_tables(section.groups)]
    sentences, matrices = build_identity(section.groups)
    lines = [f"{line}\n" for line in sentences]
    matrices = [table.text for table in matrices]
    return "\n".join([f"Corpus: {section.corpus}\n", *tables, *lines, *matrices])


def build_identity(groups: Sequence[Group]) -> tuple[list[str], list[Table]]:
    """Compare the runs with the same settings bitwise.

    Return a sentence for each set of identical runs, and a matrix of the sets that differ. If there
    are many, the matrix has only the column of the longest run. A second table contains the facts
    about machines and versions that differ between these sets.
    """
    sentences, matrices = [], []
    for comparable in comparable_sets(groups):
        sets = identical_sets(comparable)
        for runs in (runs for runs in sets if len(runs) > 1):
            *names, last = map(run_title, runs)
            text = compare(runs[0], runs[-1])  # the longest and the shortest run
            sentences.append(f"{', '.join(names)} and {last}: {text}")
        longest = [runs[0] for runs in sets]
        if len(longest) == 2:
            names = " and ".join(map(run_title, longest))
            sentences.append(f"{names}: {compare(*longest)}")
        elif len(longest) > 2:
            matrices.append(_matrix(longest))
        starts = {run.name: run.start_facts for run in longest}
        facts, _ = build_differences("Last starts of these runs", starts)
        if facts:
            matrices.append(facts)
    return sentences, matrices


def _matrix(runs: Sequence[RunMetrics]) -> Table:
    columns = runs if len(runs) <= _MAX_COLUMNS else runs[:1]
    rows = [
        [run.name, *("-" if run is other else compare(other, run) for other in columns)]
        for run in runs
    ]
    note = "Runs with the same settings, compared bitwise. Identical runs share a row."
    return Table("Differences", note, ["run", *(run.name for run in columns)], rows)


def build_differences(
    title: str, values: Mapping[str, Mapping[str, Any]]
) -> tuple[Table | None, Table]:
    """Divide named values, such as the configs of runs, into different and common values."""
    names = dict.fromkeys(name for each in values.values() for name in each)
    texts = {name: [_text(each.get(name)) for each in values.values()] for name in names}
    common = [[name, found[0]] for name, found in texts.items() if len(set(found)) == 1]
    rows = [[name, *_marked(found)] for name, found in texts.items() if len(set(found)) > 1]
    shared = Table(f"{title}: common" if len(values) > 1 else title, "", ["name", "value"], common)
    if not rows:
        return None, shared
    header = ["", *values]
    if len(rows) < len(values):
        header, *rows = zip(header, *rows)
    return Table(f"{title}: differences", "", header, rows), shared


def _marked(texts: Sequence[str]) -> list[str]:
    """Mark the texts that differ from the most common text, which is the first one in a tie."""
    ((usual, _),) = collections.Counter(texts).most_common(1)
    return [text if text == usual else Unusual(text) for text in texts]


def _text(value: Any) -> str:
    """Return a value as text. A value that is the same on all ranks is shown once."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return _text(value[0])
    return "-" if value is None else str(value)
