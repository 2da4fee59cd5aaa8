"""Modules that replace some names of other modules.

A program may replace more names. This affects neither other programs nor TensorFlow, because the
modules inside of a namespace are namespaces too.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any


class Namespace(types.ModuleType):
    """A module that defines some names and looks up all other names in other modules."""

    def __init__(self, name: str, *behind: Any, **names: Any):
        super().__init__(name)
        self.__dict__.update(names)
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        for module in self.__dict__["_behind"]:
            try:
                value = getattr(module, name)
            except AttributeError as error:
                if "Keras 3" in str(error):  # tf_keras is missing
                    raise
                continue
            return self._add(name, value) if isinstance(value, types.ModuleType) else value
        if name.startswith("__"):  # Python looks for optional names
            raise AttributeError(name)
        return self._missing(name)

    def _add(self, name: str, module: types.ModuleType) -> types.ModuleType:
        return self.__dict__.setdefault(name, Namespace(module.__name__, module))

    def _missing(self, name: str) -> Any:
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def class_like(cls: type, create: Callable[..., Any]) -> type:
    """Return a class whose instances are the instances of `cls`, but which `create` creates."""

    class Type(type):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return create(*arguments, **options)

        def __instancecheck__(self, value: Any) -> bool:
            return isinstance(value, cls)

    return Type(cls.__name__, (), {})


class Package(Namespace):
    """A package that imports its modules when they are used."""

    def __init__(self, name: str):
        super().__init__(name, importlib.import_module(name))

    def _add(self, name: str, module: types.ModuleType) -> types.ModuleType:
        return self.__dict__.setdefault(name, Package(module.__name__))

    def _missing(self, name: str) -> Any:
        try:
            return self._add(name, importlib.import_module(f"{self.__name__}.{name}"))
        except ModuleNotFoundError:
            return super()._missing(name)
