"""Options: dataclass fields with a help text, and checks of their types and ranges."""

import dataclasses
import functools
import math
import operator
import sys
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from lm.errors import UserError, first_line

Settings = TypeVar("Settings")

MAX_INT = 2**31 - 1  # the largest valid tensor dimension; the default limit of integers
MAX_SEED = 2**62
_type_hints = functools.cache(typing.get_type_hints)  # evaluates the annotations of the class
_RANGE_CHECKS = {
    "low": (operator.ge, "at least"),
    "above": (operator.gt, "greater than"),
    "high": (operator.le, "at most"),
    "below": (operator.lt, "less than"),
}


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] = (),
    per_host: bool = False,
    is_path: bool = False,
    required: bool = False,
    repeatable: bool = False,
    affects: str | None = None,
    used_by: str = "",
    **limits: float,
) -> Any:
    """Declare a field of a `Checked` dataclass, such as `Config` or `RunOptions`.

    Args:
      default: The value if a config file and the command line do not set the field.
      help: One line for `--help`.
      choices: The allowed values; empty for all values.
      per_host: Whether ranks may have different values, such as numbers of threads.
      is_path: Whether the value is a path, which may differ between ranks, and in which the command
        line expands `~/`.
      required: Whether the command line must set the field.
      repeatable: Whether the flag of a string may occur several times. Its values are separated by
        spaces in the field.
      affects: The results that the value changes: the corpus and its token IDs ("data"), the
        trained "weights", only the "length" of the training, only the perplexities of an
        "evaluation", or "nothing". The class has a default. See `lm.record.may_differ`.
      used_by: The field that selects whether the value is used, and its choices that use the value,
        such as "lr_schedule linear or cosine". The help starts with the choices. See
        `lm.config.Config.unused`.
      **limits: The range, as `low` or `above` and `high` or `below`. The bounds `low` and `high`
        are allowed values. Integers have a `high` of MAX_INT by default.
    """
    help = f"{used_by.partition(' ')[2]}: {help}" if used_by else help
    metadata = dict(help=help, choices=choices, limits=limits, affects=affects)
    metadata.update(per_host=per_host or is_path, is_path=is_path, required=required)
    metadata.update(repeatable=repeatable, used_by=used_by)
    return dataclasses.field(default=default, metadata=metadata)


def field_type(cls: type, name: str) -> tuple[type, bool]:
    """Return the type of a field without None, and whether None is allowed."""
    hint = _type_hints(cls)[name]
    for plain in (int, float, bool, str):
        if hint in (plain, plain | None):
            return plain, hint is not plain
    raise UserError(f"{name} must be an int, float, bool or str, optionally | None")


def replaced(settings: Settings, **fields: Any) -> Settings:
    """Return settings with different values, or raise UserError if a value is invalid."""
    try:
        changed = dataclasses.replace(settings, **fields)
        Checked.__post_init__(changed)  # A user's subclass may not call it.
        return changed
    except UserError:
        raise
    except Exception as error:  # The checks of a user's subclass may raise any error.
        name = type(settings).__name__
        raise UserError(f"{name}: {type(error).__name__}: {first_line(error)}") from error


class Checked:
    """Base of dataclasses that raise UserError if a field has the wrong type or range."""

    affects_by_default = "weights"  # see `option`

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "help" not in field.metadata:
                raise UserError(f"{field.name} must be declared as option(default, help)")
            value = getattr(self, field.name)
            expected, is_optional = field_type(type(self), field.name)
            if value is None and is_optional:
                continue
            if value == "" and is_optional:  # The user's shell variable may be unset.
                raise UserError(f"{field.name} is empty: give a value, or leave it out")
            if hasattr(value, "item"):  # a scalar of NumPy
                value = value.item()
            if expected is float and type(value) is int:
                value = float(value)
            if value == math.inf:  # JSON cannot represent infinity.
                value = sys.float_info.max
            object.__setattr__(self, field.name, value)
            if type(value) is not expected:
                raise UserError(f"{field.name} must be {expected.__name__}, not {value!r}")
            _check_range(field, value)


def limits_of(field: dataclasses.Field, plain_type: type) -> dict[str, float]:
    """Return the limits of a field; see `option`."""
    return {**({"high": MAX_INT} if plain_type is int else {}), **field.metadata["limits"]}


def _check_range(field: dataclasses.Field, value: Any) -> None:
    choices = field.metadata["choices"]
    if choices and value not in choices:
        allowed = ", ".join(map(str, choices))
        raise UserError(f"{field.name} must be one of {allowed}, not {value!r}")
    for limit, bound in limits_of(field, type(value)).items():
        is_valid, words = _RANGE_CHECKS[limit]
        if not is_valid(value, bound):
            raise UserError(f"{field.name} must be {words} {bound}, not {value}")


def defaults(cls: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls)}
