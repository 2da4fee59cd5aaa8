"""Config and RunOptions: published values, types, ranges and flags."""

import dataclasses
import math
import sys

import pytest

from lm.config import Config, RunOptions
from lm.config_file import load_config_file
from lm.errors import UserError
from lm.record import settings_that_follow_validation
from lm.search.settings import SearchOptions
from tests.commands import parse_flags

PLATEAU = 20 / 35, "plateau", 0.25
CONSTANT = "decay", 1.0, 5
PUBLISHED = {  # Zaremba et al. (2014) with the tutorial's decay, and pytorch/examples
    "config_small": (0.1, 200, 2, 20, 1.0, 20, 13, 5, False, 1.0, "decay", 0.5, 5),
    "config_medium": (0.05, 650, 2, 35, 0.5, 20, 39, 5, False, 1.0, "decay", 0.8, 7),
    "config_small_tied": (0.0707107, 200, 2, 35, 0.8, 20, 40, 8.75, True, *PLATEAU),
    "config_medium_tied": (0.0392232, 650, 2, 35, 0.5, 20, 40, 8.75, True, *PLATEAU),
    "config_large_tied": (0.0258199, 1500, 2, 35, 0.35, 20, 40, 8.75, True, *PLATEAU),
    "config_awd_lstm": (0.0294884, 1150, 3, 70, 0.75, 20, 500, 17.5, True, 30 / 70, *CONSTANT),
    # The published config has no warmup.
    "config_large": (0.04, 1500, 2, 35, 0.35, 20, 55, 10, False, 1.0, "decay", 1 / 1.15, 15),
}
FIELDS = (
    "init_scale hidden_size num_layers num_steps keep_prob batch_size num_epochs max_grad_norm"
    " tie_weights learning_rate lr_schedule"
).split()
OF_SCHEDULE = {"decay": ["lr_decay", "lr_decay_start_epoch"], "plateau": ["lr_plateau_factor"]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_have_the_published_values(name):
    config = load_config_file(name).config
    fields = [*FIELDS, *OF_SCHEDULE[config.lr_schedule]]
    assert tuple(getattr(config, field) for field in fields) == PUBLISHED[name]


def test_the_awd_lstm_has_the_values_of_its_paper():
    config = load_config_file("config_awd_lstm").config
    keep_probs = config.embedding_keep_prob, config.output_keep_prob, config.recurrent_keep_prob
    assert config.embedding_size == 400 and keep_probs == (0.6, 0.6, 0.5)
    assert config.locked_dropout
    assert (config.activation_penalty, config.temporal_activation_penalty) == (2, 1)
    assert config.asgd_trigger_epochs == 5 and config.weight_decay == pytest.approx(8.4e-5)


@pytest.mark.parametrize(
    "field, value",
    [
        ("keep_prob", 0.0),
        ("keep_prob", 1.5),
        ("keep_prob", float("nan")),
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("batch_size", True),
        ("hidden_size", "200"),
        ("adaptive_softmax_cutoffs", "0"),
        ("adaptive_softmax_cutoffs", "20,10"),
        ("adaptive_softmax_cutoffs", "10,10"),
        ("adaptive_softmax_cutoffs", "10,"),
        ("adaptive_softmax_cutoffs", "ten"),
        ("adaptive_input", True),  # without cutoffs
        ("learning_rate", -1.0),
        ("learning_rate", float("inf")),
        ("scale_lr_by_worker", "cubic"),
        ("momentum", 1.0),
        ("seed", -1),
    ],
)
def test_an_invalid_value_is_an_error_that_names_the_field(field, value):
    with pytest.raises(UserError, match=field):
        Config(**{field: value})


def test_an_empty_path_is_an_error():
    """The variable in --init_from "$CHECKPOINT" may be unset."""
    with pytest.raises(UserError, match="init_from is empty"):
        RunOptions(init_from="")


def test_integers_become_floats_and_infinity_becomes_the_largest_float():
    assert isinstance(Config(learning_rate=1).learning_rate, float)
    config = Config(max_grad_norm=math.inf)
    assert config.max_grad_norm == sys.float_info.max
    assert dataclasses.replace(config) == config


def test_each_setting_declares_its_effect():
    effects = {"data", "weights", "length", "evaluation", "nothing"}
    for cls in (Config, RunOptions, SearchOptions):
        found = {field.metadata["affects"] for field in dataclasses.fields(cls)}
        assert found <= {*effects, None} and cls.affects_by_default in effects


def test_zero_turns_off_the_average_of_a_config():
    awd_lstm = load_config_file("config_awd_lstm").config
    with pytest.raises(UserError, match="two averages: set one of them to 0"):
        dataclasses.replace(awd_lstm, ema_decay=0.9)
    config = dataclasses.replace(awd_lstm, ema_decay=0.9, asgd_trigger_epochs=0)
    assert settings_that_follow_validation(dataclasses.asdict(config), RunOptions()) == []


def test_a_setting_without_an_effect_is_rejected():
    unused = Config(optimizer="adam", lr_schedule="linear").unused
    assert {"momentum", "rmsprop_decay", "lr_decay", "lr_plateau_factor"} < unused.keys()
    assert unused.keys().isdisjoint({"adam_beta1", "lr_min_ratio", "weight_decay", "num_epochs"})
    with pytest.raises(
        UserError, match=r"^adam_epsilon .* sgd: remove it, or choose optimizer adam$"
    ):
        Config().check_used(["learning_rate", "adam_epsilon"], Config())
    Config(num_steps_total=0).check_used(["num_epochs"], Config())


def test_a_setting_of_the_config_file_without_an_effect_is_a_warning(caplog):
    file = Config(momentum=0.8)
    dataclasses.replace(file, optimizer="momentum").check_used(["optimizer"], file)
    Config(optimizer="momentum", momentum=0.8).check_used([], Config(optimizer="momentum"))
    assert not caplog.messages
    file.check_used([], file)
    (message,) = caplog.messages
    assert message.startswith("momentum of the config file has no effect with optimizer sgd: ")


def parse(*arguments):
    return parse_flags(["lm.train", *arguments])


def test_flags_override_the_config():
    flags = ["--batch_size", "40", "--keep_prob=0.25", "--noeval"]
    config, options, functions = parse("--config", "config_medium", *flags)
    medium = load_config_file("config_medium").config
    assert config == dataclasses.replace(medium, batch_size=40, keep_prob=0.25)
    assert options == RunOptions(eval=False) and functions.is_built_in


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--no_such_flag", "1"], "no_such_flag"),
        (["--batch_size", "many"], "batch_size"),
        (["--keep_prob"], "keep_prob"),
        (["--noeval=true"], "--noeval=true does not take an argument"),
    ],
)
def test_an_invalid_flag_is_an_error_that_names_the_flag(arguments, message):
    with pytest.raises(UserError, match=message):
        parse(*arguments)
