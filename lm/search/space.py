"""The search space: `--space`."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from lm.config import Config
from lm.errors import UserError, first_line
from lm.options import field_type, replaced
from lm.record import may_differ

Space = Mapping[str, BaseDistribution]

_EXAMPLE = "write learning_rate=0.3:3:log, keep_prob=0.5:1.0, hidden_size=100|200|300"


def parse_space(text: str, config: Config) -> dict[str, BaseDistribution]:
    """Turn `--space` into Optuna's distributions, each checked against the common config.

    The parts "field=low:high", "field=low:high:log" and "field=a|b|c" are separated by commas.
    """
    space = {}
    for part in text.split(","):
        name, _, values = map(str.strip, part.partition("="))
        try:
            if name in space:
                raise ValueError(f"{name} occurs twice")
            space[name] = _distribution(config, name, values)
        except ValueError as error:
            raise UserError(f"space: {part.strip()!r}: {first_line(error)}; {_EXAMPLE}") from error
    return space


def _distribution(config: Config, name: str, values: str) -> BaseDistribution:
    if not values:
        raise ValueError("this is not field=values")
    if name not in {field.name for field in dataclasses.fields(config)}:
        raise ValueError(f"{name!r} is not a Config field (see docs/flags.md)")
    if name not in may_differ("search", type(config)):
        raise ValueError(
            f"cannot search {name}; all trials must have the same corpus, vocabulary, name and"
            " evaluation"
        )
    plain_type = field_type(type(config), name)[0]

    def value(text: str) -> Any:
        text = text.strip()
        is_bool = plain_type is bool
        parsed = {"true": True, "false": False}.get(text, text) if is_bool else plain_type(text)
        return getattr(replaced(config, **{name: parsed}), name)  # checks the value

    if ":" not in values:
        return CategoricalDistribution([value(text) for text in values.split("|")])
    low, high, *scale = values.split(":")
    if plain_type not in (int, float) or scale not in ([], ["log"]):
        raise ValueError("this is not a range")
    kind = IntDistribution if plain_type is int else FloatDistribution
    return kind(value(low), value(high), log=bool(scale))


def combinations(space: Space, most: int) -> list[dict[str, Any]]:
    """Return the first `most` combinations of a space of choices, for `--sampler grid`."""
    for name, distribution in space.items():
        if not isinstance(distribution, CategoricalDistribution):
            raise UserError(f"space: grid needs choices for {name}, such as {name}=a|b|c")
    values = itertools.product(*(distribution.choices for distribution in space.values()))
    return [dict(zip(space, each)) for each in itertools.islice(values, most)]


def choose_config(space: Space, trial: optuna.Trial, config: Config) -> Config:
    """Return the config of a trial, or raise UserError if its values are invalid."""
    return replaced(config, **{name: _suggest(trial, name, space[name]) for name in space})


def _suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    kind = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
    return kind(name, distribution.low, distribution.high, log=distribution.log)
