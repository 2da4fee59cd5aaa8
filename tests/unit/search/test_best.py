"""best.py: a self-contained config file, even if the config file of the search has a network."""

import dataclasses
import re
import shlex

import optuna
import pytest

from lm.config_file import load_config_file
from lm.search.options import SearchOptions, Settings
from lm.search.results import write_best
from lm.search.study import CONFIG, Search


@pytest.mark.parametrize("name", ["config_small", "config_transformer"])
def test_best_has_the_config_and_the_network_of_the_trial(tmp_path, name):
    directory = tmp_path / 'a \\u "b" """'
    directory.mkdir()
    file = load_config_file(name)
    config = dataclasses.asdict(dataclasses.replace(file.config, hidden_size=12))
    study = optuna.create_study()
    study.add_trial(optuna.trial.create_trial(value=3.0, user_attrs={CONFIG: config}))
    settings = Settings("", {"data_path": str(directory)})
    search = Search(str(directory), settings, SearchOptions(), file, file.config, {}, [], study)
    best = load_config_file(write_best(search))
    assert dataclasses.asdict(best.config) == config
    assert best.functions.by_name.keys() == file.functions.by_name.keys()
    assert dataclasses.fields(best.config)[-1].name == dataclasses.fields(file.config)[-1].name
    source = (directory / "best.py").read_text()
    command = shlex.split(re.search("# (python .*)", source).group(1))
    assert command[3:] == ["--config", f"{directory}/best.py", f"--data_path={directory}"]
