"""The page of a search: its tables, Optuna's plots and the learning curves of the best trials."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Optional

import matplotlib

matplotlib.use("Agg")  # hosts of clusters have no display
import optuna
import optuna.visualization.matplotlib as plots
from matplotlib import pyplot
from matplotlib.axes import Axes
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import FrozenTrial, TrialState

from lm import run_files
from lm.report.curves import draw_curves, drawn
from lm.report.metrics import read_run
from lm.report.page import CURVES, details_html, image_html, line_html, page_html, table_html
from lm.report.search import FoundSearch, best_trials, search_tables, summary

logger = logging.getLogger("lm")

_NUM_CURVES = 6  # more would not be told apart


def _draw_importances(study: optuna.Study, target_name: str) -> Axes:
    # Optuna's default, the best tenth, would be two of 20 trials, and say what those two share.
    quantile = min(max(0.1, 5 / len(_finished(study))), 0.5)
    evaluator = PedAnovaImportanceEvaluator(target_quantile=quantile)
    return plots.plot_param_importances(study, evaluator, target_name=target_name)


_PLOTS = (
    (
        "Optimisation history",
        "Each finished trial, and the best so far.",
        plots.plot_optimization_history,
    ),
    ("Parallel coordinates", "One line for each finished trial.", plots.plot_parallel_coordinate),
    (
        "Parameter importances",
        "What sets the best tenth of the trials, at least five but at most half of them, apart from"
        " all, by PED-ANOVA (Watanabe et al. 2023). A few trials tell little.",
        _draw_importances,
    ),
)


def build_search_page(search: FoundSearch) -> str:
    """Return the report of a search as one HTML page."""
    best, everything = map(table_html, search_tables(search))
    parts = [*map(line_html, summary(search)), best]
    for title, note, draw in _PLOTS:
        png = _plot(draw, search.study)
        parts += [image_html(title, note, png)] if png else []
    curves = _learning_curves(search)
    parts += [image_html("Learning curves of the best trials", CURVES, curves)] if curves else []
    settings = {**search.settings["options"], **search.settings["run"]}
    lines = [f"{name} = {value!r}" for name, value in settings.items() if value is not None]
    config = [f"{name} = {value!r}" for name, value in search.settings["config"].items()]
    parts += [everything, details_html("How it was searched", "\n".join(lines))]
    parts.append(
        details_html("What all trials have in common, where not searched", "\n".join(config))
    )
    return page_html(search.title, parts)


def _plot(draw: Callable[..., Axes], study: optuna.Study) -> Optional[bytes]:
    """Return one of Optuna's plots as a PNG file, or None where there is too little to see."""
    if len(_finished(study)) < 2:
        return None
    with warnings.catch_warnings(), matplotlib.rc_context():  # they set a style for all to come
        warnings.simplefilter("ignore")  # that they are experimental
        figure = draw(study, target_name="valid perplexity").figure
        figure.set_size_inches(10, 5)
        png = drawn(figure, "png", dpi=110, bbox_inches="tight")
        pyplot.close(figure)
    return png


def _finished(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _learning_curves(search: FoundSearch) -> Optional[bytes]:
    trials = best_trials(search.study, _NUM_CURVES)
    directories = [run_files.trial_dir(search.directory, trial.number) for trial in trials]
    runs = [read_run(directory) for directory in directories if os.path.isdir(directory)]
    if not runs:
        return None
    labels = [f"trial {os.path.basename(run.directory)}" for run in runs]
    return drawn(draw_curves(runs, labels, title=""), "png", dpi=110)
