"""best.py: a config file that stands alone, also where the search's file brings a network."""

import dataclasses

import optuna
import pytest

from lm.config_file import load_config_file
from lm.search.options import SearchOptions, Settings
from lm.search.prepare import Prepared
from lm.search.winner import write_best


@pytest.mark.parametrize("name", ["config_small", "config_gru", "config_transformer"])
def test_best_gives_the_config_and_the_network_of_the_trial(tmp_path, name):
    file = load_config_file(name)
    config = dataclasses.replace(file.config, hidden_size=12)
    trial = optuna.trial.create_trial(value=3.0, user_attrs={"config": dataclasses.asdict(config)})
    settings = Settings("study", dataclasses.asdict(file.config), SearchOptions(), {})
    write_best(trial, Prepared(settings, file, file.config, {}, []), str(tmp_path))
    best = load_config_file(str(tmp_path / "best.py"))
    assert dataclasses.asdict(best.config) == dataclasses.asdict(config)
    assert best.functions.keys() == file.functions.keys()
    assert dataclasses.fields(best.config)[-1].name == dataclasses.fields(file.config)[-1].name
