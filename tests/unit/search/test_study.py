"""The study: which values a trial has, and where it is kept."""

import sys

import pytest
from optuna.trial import TrialState

from lm.config import Config
from lm.errors import UserError
from lm.search.options import SearchOptions, Settings
from lm.search.space import config_of, parse_space
from lm.search.study import Study, check_storage


@pytest.mark.parametrize("sampler", ["tpe", "random", "nsgaii", "cmaes"])
def test_a_trial_has_the_same_values_if_its_driver_dies_between_them(tmp_path, sampler):
    def values_of(study, cut):
        space = parse_space("learning_rate=1:8, keep_prob=0.5:1", Config())
        for number in range(3):
            trial = study.claim()
            if cut:
                (name, each), _ = space.items()
                trial.suggest_float(name, each.low, each.high)
                study.release(trial)
                trial = study.claim()
            config_of(space, trial, Config())
            study.tell(trial, TrialState.COMPLETE, float(number))
        return [trial.params for trial in study.trials()]

    options = SearchOptions(space="learning_rate=1:8", sampler=sampler)
    found = []
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        settings = Settings(name, {"num_epochs": 2}, options, {})
        found.append(values_of(Study(settings, str(tmp_path / name), {}, True), name == "cut"))
    assert found[0] == found[1] and len({str(params) for params in found[0]}) == 3


@pytest.mark.parametrize(
    "storage, message",
    [
        ("postgresql://me:secret@host/db", "PGPASSWORD"),
        ("postgresql://host:abc/db", "must be like postgresql://USER@HOST/DATABASE"),
        ("postgresql:", "must be like"),
        ("postgresqlfoo://host/db", "must be like"),
        ("postgresql+foo://host/db", "must be like"),
        ("sqlite:///study.db", "for one driver leave it out"),
        ("postgresql+asyncpg://host/db", "pip install psycopg2-binary"),
    ],
)
def test_a_storage_that_cannot_be_used_is_one_line(storage, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "asyncpg", None)  # as where it is not installed
    with pytest.raises(UserError, match=message) as caught:
        check_storage(SearchOptions(storage=storage))
    assert "\n" not in str(caught.value)
