"""The study: the values of each run, and its storage."""

import contextlib
import sys

import pytest
from optuna.trial import TrialState

from lm.config import Config
from lm.errors import UserError
from lm.search.options import SearchOptions, Settings
from lm.search.space import config_of, parse_space
from lm.search.study import RUN, Given, open_search, open_study, requeue_interrupted, runs


@pytest.mark.parametrize("sampler", ["tpe", "random", "nsgaii", "cmaes"])
def test_a_run_has_the_same_values_if_its_driver_dies_between_two_values(tmp_path, sampler):
    space = parse_space("learning_rate=1:8, keep_prob=0.5:1", Config())

    def ask(study, number):
        trial = study.ask()
        if RUN not in trial.user_attrs:
            trial.set_user_attr(RUN, number)
        return trial

    def values(study, is_interrupted):
        for number in range(8):
            trial = ask(study, number)
            if is_interrupted:
                trial.suggest_float("learning_rate", 1, 8)
                requeue_interrupted(study)
                trial = ask(study, number)
            config_of(space, trial, Config())
            study.tell(trial, float(number))
        return [trial.params for trial in runs(study)]

    found = []
    for name in ("whole", "interrupted"):
        (tmp_path / name).mkdir()
        options = SearchOptions(space="learning_rate=1:8", sampler=sampler)
        settings = Settings(name, {"num_epochs": 2}, options, {})
        study = open_study(settings, str(tmp_path / name), space, True)
        found.append(values(study, name == "interrupted"))
    assert found[0] == found[1] and len({str(params) for params in found[0]}) >= 6


def test_an_interrupted_run_is_requeued_but_a_failed_run_is_not(tmp_path):
    settings = Settings("name", {"num_epochs": 2}, SearchOptions(), {})
    study = open_study(settings, str(tmp_path), {}, True)
    for number, attributes in enumerate([{}, {"failure": "nan"}]):
        trial = study.ask()
        for name, value in {RUN: number, **attributes}.items():
            trial.set_user_attr(name, value)
        trial.report(90.0, 3)
    requeue_interrupted(study)
    assert [trial.state for trial in runs(study)] == [TrialState.WAITING, TrialState.FAIL]
    assert [trial.last_step for trial in runs(study)] == [3, 3]


@pytest.mark.parametrize(
    "storage, message",
    [
        ("postgresql://me:secret@host/db", "PGPASSWORD"),
        ("postgresql://host:abc/db", "write postgresql://USER@HOST/DATABASE"),
        ("postgresql:", "write postgresql:"),
        ("postgresqlfoo://host/db", "write postgresql:"),
        ("postgresql+asyncpg://host/db", "pip install psycopg2-binary"),
    ],
)
def test_an_invalid_storage_is_one_line(storage, message, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "asyncpg", None)  # a package that is not installed
    given = Given("config_test", {}, {"space": "seed=1|2", "storage": storage}, {})
    with pytest.raises(UserError, match=message) as caught, contextlib.ExitStack() as stack:
        open_search(str(tmp_path / "search"), False, given, stack)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
