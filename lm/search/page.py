"""The HTML page of a search: its tables, two plots of Optuna, and the best learning curves."""

from __future__ import annotations

import os
import warnings

import matplotlib

matplotlib.use("Agg")  # the hosts of clusters have no display
import optuna.visualization.matplotlib as plots
from matplotlib import pyplot

from lm import run_files
from lm.report.curves import draw_curves, rendered
from lm.report.metrics import read_run
from lm.report.page import details_html, image_html, line_html, page_html, table_html
from lm.search.results import FoundSearch, search_tables, summary
from lm.search.study import RUN, best_runs

_MAX_CURVES = 6  # more curves would be hard to distinguish
_PLOTS = {
    "Optimization history": plots.plot_optimization_history,
    "Parallel coordinates": plots.plot_parallel_coordinate,
}


def build_search_page(search: FoundSearch) -> str:
    """Return the report of a search as an HTML page. optuna-dashboard has more plots."""
    best_trials, all_trials = map(table_html, search_tables(search))
    finished = best_runs(search.study, _MAX_CURVES)
    parts = [*map(line_html, summary(search)), best_trials]
    if len(finished) > 1:  # otherwise, the plots would be empty
        parts += [image_html(title, _plot(search, title)) for title in _PLOTS]
    directories = [run_files.trial_dir(search.directory, t.user_attrs[RUN]) for t in finished]
    curves = [read_run(directory) for directory in directories if os.path.isdir(directory)]
    if curves:
        labels = [f"trial {os.path.basename(run.directory)}" for run in curves]
        png = rendered(draw_curves(curves, labels, title=""), "png")
        parts.append(image_html("Learning curves of the best trials", png))
    options = {**search.settings["options"], **search.settings["run"]}
    parts.append(details_html("Options of the search", options))
    parts.append(details_html("Common config of the trials", search.settings["config"]))
    return page_html(search.title, [*parts, all_trials])


def _plot(search: FoundSearch, title: str) -> bytes:
    with warnings.catch_warnings(), matplotlib.rc_context():  # the plots change global styles
        warnings.simplefilter("ignore")  # the plots are experimental
        figure = _PLOTS[title](search.study, target_name="valid perplexity").figure
        figure.set_size_inches(10, 5)
        png = rendered(figure, "png", bbox_inches="tight")
        pyplot.close(figure)
    return png
