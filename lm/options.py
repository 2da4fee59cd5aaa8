"""Options: dataclass fields with a help text, a range and checks."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lm.errors import UserError, first_line

Settings = TypeVar("Settings")

_PLAIN_TYPES: tuple[type, ...] = (int, float, bool, str)
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
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] = (),
    per_host: bool = False,
    is_path: bool = False,
    required: bool = False,
    may_change: Sequence[str] = ("search",),
) -> Any:
    """Declare a field of a `Checked` dataclass, such as `Config` or `RunOptions`.

    Args:
      default: The value if neither a config file nor a flag sets the field.
      help: One line for `--help`.
      low: Smallest allowed value.
      above: The value must be greater than this.
      high: Largest allowed value.
      below: The value must be less than this.
      choices: The allowed values, if they are few.
      per_host: Whether ranks may have different values, such as paths and threads.
      is_path: Whether the value is a path, in which the command line expands `~/`.
      required: Whether the command line must set the field.
      may_change: When the value may differ within one run or search. "resume": when the run or the
        search is resumed. "evaluate": when the weights are used, or when the run is resumed and no
        decision depends on validation. "search": `lm.search` may set it.

    Returns:
      A dataclass field.
    """
    rules = dict(low=low, above=above, high=high, below=below, choices=tuple(choices))
    marks = dict(per_host=per_host, is_path=is_path, required=required)
    marks["may_change"] = frozenset(may_change)
    return dataclasses.field(default=default, metadata=dict(help=help, **marks, **rules))


def may_change(cls: type, *occasions: str) -> set[str]:
    """Return the names of the fields that may change on one of the occasions; see `option`."""
    fields = dataclasses.fields(cls)
    return {field.name for field in fields if field.metadata["may_change"] & {*occasions}}


def field_type(cls: type, name: str) -> tuple[type, bool]:
    """Return the plain type of a field, and whether None is allowed.

    Raises:
      UserError: If the type is not int, float, bool or str, or one of them or None.
    """
    hint = typing.get_type_hints(cls)[name]
    for plain in _PLAIN_TYPES:
        if hint in (plain, plain | None):
            return plain, hint is not plain
    raise UserError(f"{name} must be an int, float, bool or str, or one of them | None")


def replaced(settings: Settings, **fields: Any) -> Settings:
    """Return settings with different values, as `dataclasses.replace` does.

    Args:
      settings: A dataclass, possibly a config file's subclass with its own checks.
      **fields: The values.

    Raises:
      UserError: If a value is invalid.
    """
    try:
        changed = dataclasses.replace(settings, **fields)
        Checked.__post_init__(changed)  # a subclass may have replaced it
        return changed
    except UserError:
        raise
    except Exception as error:  # from the subclass
        name = type(settings).__name__
        raise UserError(f"{name}: {type(error).__name__}: {first_line(error)}") from error


class Checked:
    """Base of dataclasses whose fields are checked for type and range."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "help" not in field.metadata:  # in a user's subclass
                raise UserError(f"{field.name} must be declared as option(default, help)")
            value = getattr(self, field.name)
            expected, is_optional = field_type(type(self), field.name)
            if value is None and is_optional:
                continue
            if value == "" and is_optional:  # from an unset shell variable
                raise UserError(f"{field.name} is empty: give a value, or leave it out")
            if expected is float and type(value) is int:
                value = float(value)
            if value == math.inf:  # JSON, which stores configs, has no infinity
                value = sys.float_info.max
            object.__setattr__(self, field.name, value)
            if type(value) is not expected:
                raise UserError(f"{field.name} must be {expected.__name__}, not {value!r}")
            if value != value:
                raise UserError(f"{field.name} must be a number, not {value}")
            _check_range(field.name, value, field.metadata)


def _check_range(name: str, value: Any, rules: Mapping[str, Any]) -> None:
    if rules["choices"] and value not in rules["choices"]:
        choices = ", ".join(map(str, rules["choices"]))
        raise UserError(f"{name} must be one of {choices}, not {value!r}")
    for rule, (is_valid, words) in _RANGE_CHECKS.items():
        bound = rules[rule]
        if bound is not None and not is_valid(value, bound):
            raise UserError(f"{name} must be {words} {bound}, not {value}")


def defaults(cls: type) -> dict[str, Any]:
    """Return the default of each field."""
    return {field.name: field.default for field in dataclasses.fields(cls)}
