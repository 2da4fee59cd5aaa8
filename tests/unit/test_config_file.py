"""Config files: settings, networks, and one-line errors for mistakes."""

import hashlib
import importlib
import shutil
import sys

import numpy as np
import optuna
import pytest

from lm.cli.parser import parse as parse_command_line
from lm.config import Config
from lm.config_file import load_config_file
from lm.errors import InfoRequested, UserError
from lm.functions import BUILT_IN
from lm.search.settings import SearchDirectory, SearchOptions
from lm.search.space import choose_config, parse_space
from tests.commands import ROOT, parse_flags, run_code


def write(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("x = 1\n", "get_config\\(\\) is not defined"),
        ("def get_config(:\n", "line 1"),
        ("def get_config():\n    return 3\n", "must return"),
        ("def get_config():\n    return 1 / 0\n", "ZeroDivisionError"),
        ("import no_such_module\n", "no_such_module"),
        ("raise ValueError('one\\ntwo')\n", "line 1: ValueError: one$"),
        ("raise SystemExit('no')\n", "line 1: SystemExit: no$"),
        (
            "from lm.config import Config\nget_config = lambda: Config(num_steps=0)\n",
            "line 2: num_steps must be at least 1",
        ),
    ],
)
def test_a_broken_config_file_is_an_error_that_names_it(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=message) as error:
        load_config_file(path)
    assert path in str(error.value)


def test_an_unknown_config_names_the_searched_directory_and_the_known_configs(tmp_path):
    for name, directory in (("config_huge", ROOT / "configs"), (str(tmp_path / "a.py"), tmp_path)):
        message = rf"in {directory} \(No such file .*config_small, config_small_tied, config_test"
        with pytest.raises(UserError, match=message):
            load_config_file(name)


def test_a_config_file_in_utf_16_is_an_error(tmp_path):
    (tmp_path / "mine.py").write_text("def get_config(): ...\n", encoding="utf-16")
    with pytest.raises(UserError, match=r"mine.py is not UTF-8 \(UTF-16\?\), so save it as UTF-8"):
        load_config_file(str(tmp_path / "mine.py"))


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("configs/config_*.py")), ids=lambda path: path.stem
)
def test_all_settings_of_a_config_have_an_effect(path, caplog):
    config = load_config_file(str(path)).config
    config.check_used([], config)
    assert not caplog.messages


def parse(*arguments):
    return parse_flags(["lm.train", *arguments])


OWN_FIELDS = """
from __future__ import annotations
import dataclasses
from typing import Optional
from lm.config import Config, option

@dataclasses.dataclass(frozen=True)
class Mine(Config):
    num_heads: Optional[int] = option(4, "heads of the attention", low=1)

def get_config():
    return Mine(hidden_size=7)
"""
BUILD = "def build_outputs(inputs_TB, state, context):\n    return inputs_TB, state\n"


def test_fields_of_a_config_file_are_flags(tmp_path):
    path = write(tmp_path, OWN_FIELDS)
    config, _, functions = parse("--hidden_size", "9", "--config", path, "--num_heads", "2")
    assert (config.num_heads, config.hidden_size, functions.is_built_in) == (2, 9, True)
    assert functions.sha256 == hashlib.sha256(OWN_FIELDS.encode()).hexdigest()
    with pytest.raises(InfoRequested, match="heads of the attention"):
        parse("--config", path, "--help")
    with pytest.raises(UserError, match="num_heads must be at least 1"):
        parse("--config", path, "--num_heads", "0")
    # Runs do not depend on a file that only contains settings.
    plain = "from lm.config import Config\ndef get_config():\n    return Config()\n"
    assert parse("--config", write(tmp_path, plain))[2] == BUILT_IN
    assert parse("--config", write(tmp_path, plain + BUILD))[2].by_name.keys() == {"build_outputs"}


@pytest.mark.parametrize(
    "text, message",
    [
        (OWN_FIELDS + BUILD + "build_logits = build_outputs\n", "and not both of the first two"),
        (OWN_FIELDS + "def state_shapes(config):\n    return {}\n", "defines state_shapes$"),
        (
            OWN_FIELDS + BUILD + "def state_shape(config): ...\n",
            "the function state_shape is not used: rename it to state_shapes",
        ),
        (OWN_FIELDS + "def build_loss(*words): ...\n", "rename it to build_losses"),
        (OWN_FIELDS.replace('option(4, "heads of the attention", low=1)', "4"), "declared as opt"),
        (OWN_FIELDS.replace("Optional[", "list["), "num_heads must be an int, float, bool or"),
        (
            OWN_FIELDS + BUILD + "def get_config():\n    return Mine(num_stesp=7)\n",
            "mine.py, line 16: TypeError: .*'num_stesp'",
        ),
    ],
)
def test_invalid_networks_and_fields_are_an_error(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_config_file(write(tmp_path, text))


def test_a_failed_check_of_a_config_file_is_one_line(tmp_path):
    check = (
        "    def __post_init__(self):\n"
        "        super().__post_init__()\n"
        "        if self.num_heads and self.hidden_size % self.num_heads:\n"
        "            raise ValueError('num_heads must divide hidden_size')\n\n"
        "def get_config"
    )
    path = write(tmp_path, OWN_FIELDS.replace("7)", "8)").replace("def get_config", check))
    assert parse("--config", path, "--num_heads", "2")[0].num_heads == 2
    with pytest.raises(UserError, match=r"^Mine: ValueError: num_heads must divide hidden_size$"):
        parse("--config", path, "--num_heads", "3")
    space = parse_space("num_heads=4|8, hidden_size=8|12", load_config_file(path).config)
    trial = optuna.trial.FixedTrial({"num_heads": 8, "hidden_size": 12})
    with pytest.raises(UserError, match=r"^Mine: ValueError"):
        choose_config(space, trial, load_config_file(path).config)


def test_a_check_of_a_config_file_does_not_replace_our_checks(tmp_path):
    check = "    def __post_init__(self):\n        pass\n\ndef get_config"
    text = OWN_FIELDS.replace("def get_config", check)
    with pytest.raises(UserError, match="hidden_size must be at least 1"):
        parse("--config", write(tmp_path, text), "--hidden_size", "0")
    with pytest.raises(UserError, match="hidden_size must be at least 1"):
        load_config_file(write(tmp_path, text.replace("7)", "0)")))


def test_modules_next_to_a_config_file_come_first(tmp_path, monkeypatch):
    for place, units in (("elsewhere", 3), ("beside", 7)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "helper_of_mine.py").write_text(f"UNITS = {units}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "elsewhere"), *sys.path])
    text = "from helper_of_mine import UNITS\nfrom lm.config import Config\n"
    text += "def get_config():\n    return Config(hidden_size=UNITS)\n"
    (tmp_path / "beside" / "uses_helper.py").write_text(text)
    path = str(tmp_path / "beside" / "uses_helper.py")
    file = load_config_file(path)
    assert file.config.hidden_size == 7 and file.loaded.sha256.keys() == {"helper_of_mine.py"}
    # In a new process, a copy of the config file imports the copy of the module.
    (tmp_path / "search").mkdir()
    shutil.copy(path, tmp_path / "search" / "config.py")
    file.loaded.copy_to(str(tmp_path / "search"))
    (tmp_path / "beside" / "helper_of_mine.py").unlink()
    command = "from lm.config_file import load_config_file as load; file = load('search/config.py')"
    command += "; print(file.config.hidden_size, *file.loaded.sha256.items())"
    found = run_code(command, cwd=tmp_path).stdout
    assert found == f"7 {(*file.loaded.sha256.items(),)[0]}\n"
    (tmp_path / "beside" / "broken_helper.py").write_text("x = (\n")
    (tmp_path / "beside" / "uses_helper.py").write_text("import broken_helper\n")
    with pytest.raises(UserError, match=r"broken_helper.py, line 1: .* never closed"):
        load_config_file(path)


def test_a_users_directory_configs_does_not_hide_our_configs(tmp_path):
    (tmp_path / "configs").mkdir()
    command = "from lm.config_file import load_config_file; load_config_file('config_small')"
    assert run_code(command, cwd=tmp_path).returncode == 0


DRAWS = """
import random
import numpy as np
from lm.config import Config
DRAWN = random.randint(1, 10**4) + np.random.randint(1, 10**4)

def get_config():
    return Config(hidden_size=DRAWN, seed=np.random.randint(1, 10**6))
"""


def test_random_numbers_of_a_config_file_are_reproducible(tmp_path):
    path = write(tmp_path, DRAWS)
    first = load_config_file(path).config
    assert load_config_file(path).config == first
    own = np.random.randint(2**31)
    assert load_config_file(write(tmp_path, DRAWS + "# another checksum\n")).config == first
    assert np.random.randint(2**31) != own  # the random state of the program does not change


def test_a_config_file_is_run_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "lm_test_layers.py").write_text("SIZES = []\n")
    text = (
        "from lm_test_layers import SIZES\nfrom lm.config import Config\nSIZES.append(5)\n"
        "def get_config():\n    return Config(hidden_size=sum(SIZES))\n"
    )
    path = write(tmp_path, text)
    assert [load_config_file(path).config.hidden_size for _ in range(2)] == [5, 5]
    # A copy in another directory is a different file.
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    assert load_config_file(write(elsewhere, text)).config.hidden_size == 10


def test_a_notebook_trains_the_modules_that_are_next_to_the_config_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load(directory, units, comment=""):
        text = "from lm_test_units import UNITS\nfrom lm.config import Config\n"
        text += f"def get_config():\n    return Config(hidden_size=UNITS)\n{comment}"
        (tmp_path / directory).mkdir(exist_ok=True)
        module = tmp_path / directory / "lm_test_units.py"
        module.write_text(f"UNITS = {units}\n")
        file = load_config_file(write(tmp_path / directory, text))
        checksum = hashlib.sha256(module.read_bytes()).hexdigest()
        assert file.loaded.sha256 == {"lm_test_units.py": checksum}
        return file.config.hidden_size

    assert load("one", 5) == 5
    with pytest.raises(UserError, match=r"lm_test_units.py has changed .*: restart Python"):
        load("one", 15)
    assert load("one", 115, "# changed") == 115  # both files have changed
    assert load("two", 25) == 25  # a module with the same name in a different directory
    assert load("one", 35, "# changed again") == 35
    sys.path.insert(0, str(tmp_path / "three"))
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "lm_test_units.py").write_text("UNITS = 4\n")
    del sys.modules["lm_test_units"]
    own = importlib.import_module("lm_test_units")
    assert own.UNITS == 4 and load("three", 45) == 45
    assert sys.modules["lm_test_units"] is own  # the program keeps what it has imported


def test_a_gradient_of_a_changed_file_needs_a_new_process(tmp_path):
    text = "import tensorflow.compat.v1 as tf\nfrom lm.config import Config\n"
    text += "get_config = Config\ntf.RegisterGradient('LmTest')(lambda op, gradient: gradient)\n"
    load_config_file(write(tmp_path, text))
    with pytest.raises(UserError, match=r"line 4: .* registers a gradient only once: restart"):
        load_config_file(write(tmp_path, text + "# changed"))


def test_a_field_with_the_name_of_a_flag_is_an_error(tmp_path):
    path = write(tmp_path, OWN_FIELDS.replace("num_heads", "resume"))
    with pytest.raises(UserError, match="--resume is already a flag of this command: rename"):
        parse("--config", path)
    path = write(tmp_path, OWN_FIELDS.replace("num_heads", "trials"))
    with pytest.raises(UserError, match="--trials is already a flag of this command: rename"):
        parse_command_line(["search", "--config", path], "", SearchDirectory, SearchOptions, Config)
