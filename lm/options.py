"""Settings: how a field of one is declared, and checked."""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from collections.abc import Sequence
from typing import Any, Optional, TypeVar

from lm.errors import UserError, first_line

Settings = TypeVar("Settings")

_PLAIN_TYPES: tuple[type, ...] = (int, float, bool, str)


def option(
    default: Any,
    help: str,
    *,
    low: Optional[float] = None,
    above: Optional[float] = None,
    high: Optional[float] = None,
    below: Optional[float] = None,
    choices: Sequence[Any] = (),
    per_host: bool = False,
    is_path: bool = False,
    required: bool = False,
    may_change: Sequence[str] = ("search",),
) -> Any:
    """Declare a field of a `Checked` dataclass: of `Config`, `RunOptions` or a command's options.

    Args:
      default: The value when neither a config file nor a flag sets it.
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
    """Tell a field's plain type and whether None is allowed.

    Raises:
      UserError: It is another than int, float, bool, str or Optional of one of these.
    """
    hint = typing.get_type_hints(cls)[name]
    plain_types = [plain for plain in _PLAIN_TYPES if hint in (plain, Optional[plain])]
    if not plain_types:
        raise UserError(f"{name} must be an int, float, bool or str, or Optional[...] of one")
    return plain_types[0], hint is not plain_types[0]


def replaced(settings: Settings, **fields: Any) -> Settings:
    """Return settings with other values, as `dataclasses.replace`.

    Args:
      settings: A dataclass, perhaps a config file's subclass with checks of its own.
      **fields: The values.

    Raises:
      UserError: They are refused.
    """
    try:
        changed = dataclasses.replace(settings, **fields)
        Checked.__post_init__(changed)  # also where that of a subclass does not call it
        return changed
    except UserError:
        raise
    except Exception as error:  # of the subclass
        name = type(settings).__name__
        raise UserError(f"{name}: {type(error).__name__}: {first_line(error)}") from error


class Checked:
    """Checks the type and range of every field; a dataclass inherits it."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "help" not in field.metadata:  # of a user's subclass
                raise UserError(f"{field.name} must be declared as option(default, help)")
            value = getattr(self, field.name)
            expected, optional = field_type(type(self), field.name)
            if value is None and optional:
                continue
            if value == "" and optional:  # of a shell's variable that is not set
                raise UserError(f"{field.name} is empty: give a value, or leave it out")
            if expected is float and type(value) is int:
                value = float(value)
                object.__setattr__(self, field.name, value)
            if value == math.inf:  # no JSON number, and configs are kept in JSON
                value = sys.float_info.max
                object.__setattr__(self, field.name, value)
            if type(value) is not expected:
                raise UserError(f"{field.name} must be {expected.__name__}, not {value!r}")
            if value != value:  # NaN: a resumed run's would not be equal to it
                raise UserError(f"{field.name} must be a number, not {value}")
            self._check_range(field.name, value, field.metadata)

    @staticmethod
    def _check_range(name: str, value: Any, rules: typing.Mapping[str, Any]) -> None:
        if rules["choices"] and value not in rules["choices"]:
            raise UserError(
                f"{name} must be one of {', '.join(map(str, rules['choices']))}, not {value!r}"
            )
        # Written so that NaN, for which every comparison is false, is refused too.
        if rules["low"] is not None and not value >= rules["low"]:
            raise UserError(f"{name} must be at least {rules['low']}, not {value}")
        if rules["above"] is not None and not value > rules["above"]:
            raise UserError(f"{name} must be greater than {rules['above']}, not {value}")
        if rules["high"] is not None and not value <= rules["high"]:
            raise UserError(f"{name} must be at most {rules['high']}, not {value}")
        if rules["below"] is not None and not value < rules["below"]:
            raise UserError(f"{name} must be less than {rules['below']}, not {value}")


def defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of a class of settings: what those mean that an older version lacked."""
    return {field.name: field.default for field in dataclasses.fields(cls)}
