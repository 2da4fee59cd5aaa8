"""The search space: `--space`, or `suggest(trial, config)` in the config file."""

from __future__ import annotations

import dataclasses
import itertools
import math
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
from lm.errors import UserError
from lm.options import field_type, may_change, replaced


class SuggestError(UserError):
    """`suggest` in the config file failed. Other values would probably fail too."""


Space = Mapping[str, BaseDistribution]
Suggest = Callable[[optuna.Trial, Config], Config]

_EXAMPLE = "write learning_rate=0.3:3:log, keep_prob=0.5:1.0, hidden_size=100|200|300"
# Random trials of suggest() before the first job.
_REHEARSALS = 20


def parse_space(text: str, config: Config) -> dict[str, BaseDistribution]:
    """Turn `--space` into Optuna's distributions, each checked against the config.

    Args:
      text: "field=low:high", "field=low:high:log" and "field=a|b|c", separated by commas.
      config: The common config of the trials.

    Raises:
      UserError: If the text, a field or a value is invalid. The message names it.
    """
    known = {field.name for field in dataclasses.fields(config)} - {"name"}
    searched = may_change(type(config), "search")
    space: dict[str, BaseDistribution] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, is_given, values = map(str.strip, part.partition("="))
        if not is_given or not values:
            raise UserError(f"space: {part!r} is not field=values; {_EXAMPLE}")
        if name not in known:
            raise UserError(f"space: {name!r} is not a Config field (see docs/flags.md)")
        if name not in searched:
            raise UserError(f"space: {_not_searched(name)}")
        if name in space:
            raise UserError(f"space: {name} occurs twice")
        space[name] = _distribution(name, field_type(type(config), name)[0], values)
        each = space[name]
        is_choice = isinstance(each, CategoricalDistribution)
        for value in each.choices if is_choice else (each.low, each.high):
            try:
                replaced(config, **{name: value})
            except UserError as error:
                raise UserError(f"space: {error}") from error
    if not space:
        raise UserError(f"space is empty; {_EXAMPLE}")
    return space


def combinations(space: Space, most: int) -> list[dict[str, Any]]:
    """Return the first `most` combinations of a space of choices, for `--sampler grid`.

    Raises:
      UserError: If a field has a range.
    """
    for name, distribution in space.items():
        if not isinstance(distribution, CategoricalDistribution):
            raise UserError(f"space: grid needs choices for {name}; write {name}=a|b|c")
    values = itertools.product(*(distribution.choices for distribution in space.values()))
    return [dict(zip(space, each)) for each in itertools.islice(values, most)]


def check_ranges(space: Space) -> None:
    """Check that a space has only ranges, for `--sampler cmaes`.

    Raises:
      UserError: If a field has choices.
    """
    for name, distribution in space.items():
        if isinstance(distribution, CategoricalDistribution):
            raise UserError(f"space: cmaes needs a range for {name}; write {name}=low:high")


def suggest_of(file: ConfigFile, config: Config) -> Suggest:
    """Return `suggest` of a config file, after some calls with random values.

    Args:
      file: The config file.
      config: The common config of the trials.

    Raises:
      UserError: If the file does not define `suggest`, or if it fails.
    """
    if not callable(file.suggest):
        raise UserError(
            f"nothing to search; give --space, or define suggest(trial, config) in {file.path}"
        )
    sampler = optuna.samplers.RandomSampler(seed=0)
    rehearsal = optuna.create_study(sampler=sampler)
    for _ in range(_REHEARSALS):
        config_of(file.suggest, rehearsal.ask(), config)
    return file.suggest


def config_of(space: Space | Suggest, trial: optuna.Trial, config: Config) -> Config:
    """Choose the values of a trial. A second call for the same trial returns the same config.

    Raises:
      SuggestError: If suggest() fails.
      UserError: If the values are invalid.
    """
    if isinstance(space, Mapping):
        values = {name: _suggest_one(trial, name, each) for name, each in space.items()}
        return replaced(config, **values)
    try:
        suggested = space(trial, config)
    except UserError as error:
        raise UserError(f"suggest(): {error}") from error
    except optuna.exceptions.OptunaError:  # of the storage
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise SuggestError(f"suggest() failed: {type(error).__name__}: {reason}") from error
    if type(suggested) is not type(config):
        wanted, given = type(config).__name__, type(suggested).__name__
        raise UserError(f"suggest() must return {wanted} like get_config(), not {given}")
    searched = may_change(type(config), "search") | {"name"}
    for name, value in dataclasses.asdict(config).items():
        if name not in searched and getattr(suggested, name) != value:
            raise UserError(f"suggest(): {_not_searched(name)}")
        if getattr(suggested, name) is None and value is not None:  # no flag of lm.train sets None
            raise UserError(f"suggest() cannot unset {name}, which is set for all trials")
    return suggested


def _not_searched(name: str) -> str:
    return f"cannot search {name}; perplexities on different corpora or vocabularies do not compare"


def _suggest_one(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    kind = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
    return kind(name, distribution.low, distribution.high, log=distribution.log)


def _distribution(name: str, plain_type: type, values: str) -> BaseDistribution:
    if ":" not in values:
        choices = [_value(name, plain_type, text) for text in values.split("|")]
        if len(set(choices)) < max(len(choices), 2):
            raise UserError(
                f"space: {name} needs two or more different values, not {values!r}; set a single"
                f" value with --{name}"
            )
        return CategoricalDistribution(choices)
    low_text, high_text, *scale = values.split(":")
    if plain_type not in (int, float) or scale not in ([], ["log"]):
        raise UserError(f"space: {values!r} is not a range for {name}; {_EXAMPLE}")
    low, high = (_value(name, plain_type, text) for text in (low_text, high_text))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(
            f"space: the range of {name}, {values}, is empty; write the lower end first"
        )
    if scale and low <= 0:
        raise UserError(f"space: the range of {name}, {values}, has no logarithm; start above 0")
    kind = IntDistribution if plain_type is int else FloatDistribution
    return kind(low, high, log=bool(scale))


def _value(name: str, plain_type: type, text: str) -> Any:
    text = text.strip()
    if plain_type is bool and text in ("true", "false"):
        return text == "true"
    try:
        if plain_type is not bool:
            return plain_type(text)
    except ValueError:
        pass
    raise UserError(f"space: {name} must be {plain_type.__name__}, not {text!r}")
