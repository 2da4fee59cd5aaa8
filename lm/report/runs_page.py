"""The page of a comparison of runs."""

import dataclasses
from collections.abc import Sequence

from lm.report.comparison import Section
from lm.report.differences import build_differences, build_identity
from lm.report.page import Part
from lm.report.plots import build_plots, line_style
from lm.report.tables import build_tables, build_tokenizer_tables, headline

_MAX_SHOWN = 12  # More lines at first would be hard to distinguish. The legend shows the others.
_UNUSUAL_NOTE = "Values that differ from the most common value are highlighted."
_NOTE = (
    "Thick lines: the mean of the last events (a fiftieth of the run). Circles: validations."
    " Above the horizontal axis, a triangle marks a restart, and a bar a checkpoint that the run"
    " directory contains. Drag to zoom, and double-click to see everything."
)


def build_parts(sections: Sequence[Section]) -> list[Part]:
    """Return a part for each section, and a part for the tokenizers."""
    parts = [_part(section) for section in sections]
    tokenizers = build_tokenizer_tables(sections)
    return [*parts, Part("Tokenizers", tables=tokenizers)] if tokenizers else parts


def _part(section: Section) -> Part:
    sentences, matrices = build_identity(section.groups)
    configs = {group.label: group.runs[0].identity for group in section.groups}
    settings, common_settings = build_differences("Settings", configs)
    settings = [settings._replace(note=_UNUSUAL_NOTE)] if settings else []
    machines = {run.name: run.start_facts for run in section.runs}
    machine_differences, common_machines = build_differences("Machines and versions", machines)
    return dataclasses.replace(
        curves_part(f"Corpus: {section.corpus}", section),
        texts=[headline(section), *sentences, *filter(None, (run.damage for run in section.runs))],
        tables=[*settings, *build_tables(section.groups), *matrices],
        folded=[*filter(None, [common_settings, machine_differences, common_machines])],
    )


def curves_part(title: str, section: Section) -> Part:
    """Return the plots of a section and their legend."""
    best_first = sorted(section.runs, key=lambda run: run.valid_perplexity)
    shown = {id(run) for run in best_first[:_MAX_SHOWN]}
    legend = []
    for index, run in enumerate(section.runs):
        color, dashes = line_style(index)
        legend.append({"name": run.name, "shown": id(run) in shown, "line": f"{dashes} {color}"})
    return Part(title, runs=legend, plots=build_plots(section), plots_note=_NOTE)
