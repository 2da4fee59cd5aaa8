"""The search space: the syntax of --space, and its checks against Config."""

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lm.config import Config
from lm.errors import UserError
from lm.search.space import choose_config, combinations, parse_space


def test_ranges_and_choices_have_the_types_of_their_fields():
    text = "learning_rate=0.3:3:log, keep_prob=0.5:1, hidden_size=100|200,num_steps=5:20:log"
    assert parse_space(text, Config()) == {
        "learning_rate": FloatDistribution(0.3, 3.0, log=True),
        "keep_prob": FloatDistribution(0.5, 1.0),
        "hidden_size": CategoricalDistribution([100, 200]),
        "num_steps": IntDistribution(5, 20, log=True),
    }


@pytest.mark.parametrize(
    "text, message",
    [
        ("learning_rate=", "not field=values"),
        ("learning_speed=1:2", "not a Config field"),
        ("seed=1|2, seed=3|4", "seed occurs twice"),
        ("eval_batch_size=1|20", "cannot search eval_batch_size; all trials must have the same"),
        ("vocab_size=10|200", "cannot search vocab_size; all trials must have the same corpus"),
        ("hidden_size=1.5:3", "invalid literal for int() with base 10: '1.5'"),
        ("learning_rate=1:2:lin", "not a range"),
        ("precision=float32:bfloat16", "not a range"),
        ("learning_rate=3:0.3", "`low <= high` must hold"),
        ("warmup_steps=0:100:log", "must hold for `log=True`"),
        ("keep_prob=0:1", "keep_prob must be greater than 0, not 0.0"),
        ("precision=float32|float16", "precision must be one of float32, bfloat16"),
    ],
)
def test_an_invalid_space_is_one_line(text, message):
    with pytest.raises(UserError, match=r"^space") as caught:
        parse_space(text, Config())
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_grid_needs_choices():
    space = parse_space("hidden_size=100|200, keep_prob=0.5|1", Config())
    assert combinations(space, 100) == [
        {"hidden_size": 100, "keep_prob": 0.5}, {"hidden_size": 100, "keep_prob": 1.0},
        {"hidden_size": 200, "keep_prob": 0.5}, {"hidden_size": 200, "keep_prob": 1.0},
    ]  # fmt: skip
    with pytest.raises(UserError, match="grid needs choices for keep_prob"):
        combinations(parse_space("keep_prob=0.5:1", Config()), 100)


def test_a_huge_grid_creates_only_the_first_combinations():
    choices = dict.fromkeys(map(str, range(40)), CategoricalDistribution([1, 2, 3]))
    first, second = combinations(choices, 2)
    assert set(first.values()) == {1} and second == {**first, "39": 2}


def test_only_searched_values_change_and_stay_in_the_space():
    space = parse_space("learning_rate=0.3:3:log, hidden_size=100:300", Config())
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    configs = [choose_config(space, study.ask(), Config(seed=7)) for _ in range(50)]
    assert all(0.3 <= config.learning_rate <= 3 for config in configs)
    assert all(100 <= config.hidden_size <= 300 for config in configs)
    assert len({config.hidden_size for config in configs}) > 10
    assert {(config.seed, config.keep_prob) for config in configs} == {(7, 1.0)}
