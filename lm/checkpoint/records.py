"""Dataclasses out of JSON that another version of this program may have written."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from lm.errors import RunError, UserError

Record = TypeVar("Record")


def load_record(cls: type[Record], values: Mapping[str, Any], source: str) -> Record:
    """Make a dataclass of what `dataclasses.asdict` returned and JSON carried.

    Args:
      cls: The dataclass; a field that an older version did not know gets its default.
      values: By field.
      source: Where they are from, for the messages.

    Raises:
      UserError: A newer version has written them.
      RunError: A field is missing or of another type.
    """
    refuse_unknown_fields(cls, values, source)
    hints = typing.get_type_hints(cls)
    try:
        fields = {name: _value(hints[name], name, v, source) for name, v in values.items()}
        return cls(**fields)
    except TypeError as error:
        raise RunError(f"{source} is damaged: {error}") from error


def refuse_unknown_fields(
    cls: type, values: Mapping[str, Any], source: str, by_file: bool = False
) -> None:
    """Refuse fields that only a newer version knows: to ignore them might change their meaning.

    Args:
      cls: The dataclass.
      values: By field.
      source: Where they are from, for the message.
      by_file: Whether a config file may have added fields to the class, and lost one since.

    Raises:
      UserError: There is one.
    """
    unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(cls)})
    if unknown and by_file:
        raise UserError(
            f"{source} has the field {unknown[0]}, which neither {cls.__name__} of the config file"
            " nor this version knows: give the class that field again, or update this program"
        )
    if unknown:
        raise newer_version(source, f"unknown field {unknown[0]}")


def newer_version(source: str, how: str) -> UserError:
    """Return the error for a file that this version cannot understand.

    Args:
      source: The file.
      how: What shows it.
    """
    return UserError(f"{source} was written by a newer version of this program ({how}); update it")


def _value(hint: Any, name: str, value: Any, source: str) -> Any:
    """Check a value against the type of its field, and undo what JSON did to it."""
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return load_record(hint, value, f"{name} of {source}")
    kinds = typing.get_args(hint) if typing.get_origin(hint) is typing.Union else (hint,)
    allowed = tuple(typing.get_origin(kind) or kind for kind in kinds)
    if tuple in allowed and isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, allowed):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value
