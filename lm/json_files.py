"""JSON files: reading them although they may be damaged, and restoring dataclasses from them."""

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from lm.errors import UserError, error_class, first_line
from lm.files import open_regular, write_atomically

_MAX_LEVELS = 20  # levels of lists and objects
_MAX_DIGITS = 30  # digits of a whole number; floats can represent such numbers

Record = TypeVar("Record")


class CorruptFile(UserError):
    """A file of a run is missing or corrupt."""


def write_json(path: str, value: Any) -> None:
    """Write a value as indented JSON; see `write_atomically`."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_object(path: str) -> dict[str, Any] | None:
    """Read a JSON file that contains an object; return None if the file is missing.

    Raises:
      CorruptFile: If the content is not a JSON object.
      RunError: If the file cannot be read, perhaps only for a moment.
    """
    try:
        with open_regular(path) as file:
            return parse_object(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise error_class(error)(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CorruptFile(f"{path} is corrupt: {error}") from error


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object from a file that may be damaged, or that another user wrote.

    Raises:
      ValueError: If the text is not an object, or has too many levels or digits.
    """
    try:
        value = json.loads(text.decode())
    except RecursionError:
        raise ValueError("it has too many levels") from None
    if not isinstance(value, dict):
        raise ValueError("it must be a JSON object")
    _check_json(value, _MAX_LEVELS)
    return value


def _check_json(value: Any, levels: int) -> None:
    if isinstance(value, (dict, list)):
        if not levels:
            raise ValueError("it has too many levels")
        for part in value.values() if isinstance(value, dict) else value:
            if type(part) is not float:  # most values in a file of a million events
                _check_json(part, levels - 1)
    elif type(value) is int and abs(value) >= 10**_MAX_DIGITS:
        raise ValueError("a number has too many digits")


def from_json(cls: type[Record], values: Mapping[str, Any], source: str) -> Record:
    """Create a dataclass from the JSON form of `dataclasses.asdict`. Missing fields get defaults.

    Raises:
      UserError: If a field is unknown, because a different version of this program wrote it.
      CorruptFile: If a field without default is missing, or a value is invalid.
    """
    unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(cls)})
    if unknown:
        raise different_version(source, f"unknown field {unknown[0]!r}")
    try:
        return cls(**typed_fields(cls, values, source))
    except UserError:
        raise
    except Exception as error:  # The checks of a config file may raise any error.
        raise CorruptFile(f"{source} is corrupt: {first_line(error)}") from error


def typed_fields(cls: type, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a dataclass from their JSON form; see `from_json`."""
    hints = typing.get_type_hints(cls)
    return {name: _value(hints[name], name, value, source) for name, value in values.items()}


def _value(hint: Any, name: str, value: Any, source: str) -> Any:
    """Check a value against the type of its field, and restore dataclasses and tuples."""
    options = typing.get_args(hint)
    for kind in options if type(None) in options else (hint,):
        plain, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            return from_json(kind, value, f"{name} of {source}")
        if plain is tuple and isinstance(value, list):
            return tuple(_value(inner[0], name, part, source) for part in value)
        if plain is Mapping and isinstance(value, dict):
            return {key: _value(inner[1], f"{name}.{key}", v, source) for key, v in value.items()}
        if kind is Any or type(value) is plain:
            return value
        if kind is float and type(value) is int:
            return float(value)
    raise CorruptFile(f"{source} is corrupt: {name} is a {type(value).__name__}")


def different_version(source: str, evidence: str) -> UserError:
    """Return the error for a file that this version of the program cannot read."""
    return UserError(
        f"{source} was written by a different version of this program ({evidence}); use that"
        " version"
    )
