"""The search space: `--space`, or `suggest(trial, config)` in the config file."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from lm.config import Config
from lm.config_file import ConfigFile
from lm.errors import UserError, first_line
from lm.options import field_type, may_change, replaced

Space = Mapping[str, BaseDistribution]
Suggest = Callable[[optuna.Trial, Config], Config]

_EXAMPLE = "write learning_rate=0.3:3:log, keep_prob=0.5:1.0, hidden_size=100|200|300"
_REHEARSALS = 20  # random trials of suggest() before the first job


def parse_space(text: str, config: Config) -> dict[str, BaseDistribution]:
    """Turn `--space` into Optuna's distributions, each checked against the common config.

    The parts "field=low:high", "field=low:high:log" and "field=a|b|c" are separated by commas.
    """
    space = {}
    for part in text.split(","):
        name, _, values = map(str.strip, part.partition("="))
        try:
            space[name] = _distribution(config, name, values)
        except ValueError as error:
            raise UserError(f"space: {part.strip()!r}: {first_line(error)}; {_EXAMPLE}") from error
    return space


def _distribution(config: Config, name: str, values: str) -> BaseDistribution:
    if not values:
        raise ValueError("this is not field=values")
    if name not in {field.name for field in dataclasses.fields(config)} - {"name"}:
        raise ValueError(f"{name!r} is not a Config field (see docs/flags.md)")
    if name not in may_change(type(config), "search"):
        raise ValueError(_not_searched(name))
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


def suggest_of(file: ConfigFile, config: Config) -> Suggest:
    """Return `suggest` of a config file, after some calls with random values."""
    if not callable(file.suggest):
        raise UserError(f"no search space: give --space, or define suggest() in {file.path}")
    rehearsal = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(_REHEARSALS):
        choose_config(file.suggest, rehearsal.ask(), config)
    return file.suggest


def choose_config(space: Space | Suggest, trial: optuna.Trial, config: Config) -> Config:
    """Return the config of a trial, or raise UserError if its values are invalid."""
    if isinstance(space, Mapping):
        return replaced(config, **{name: _suggest(trial, name, space[name]) for name in space})
    try:
        suggested = space(trial, config)
    except optuna.exceptions.OptunaError:  # the storage failed
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"suggest() failed: {type(error).__name__}: {reason}") from error
    if type(suggested) is not type(config):
        wanted, given = type(config).__name__, type(suggested).__name__
        raise UserError(f"suggest() must return {wanted} like get_config(), not {given}")
    searched = may_change(type(config), "search") | {"name"}
    for name, value in dataclasses.asdict(config).items():
        if name not in searched and getattr(suggested, name) != value:
            raise UserError(f"suggest(): {_not_searched(name)}")
    return suggested


def _not_searched(name: str) -> str:
    return f"cannot search {name}; perplexities on different corpora or vocabularies do not compare"


def _suggest(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    kind = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
    return kind(name, distribution.low, distribution.high, log=distribution.log)
