"""Modules that replace some names of other modules.

A program may replace more names. This affects neither other programs nor TensorFlow, because the
modules inside of a namespace are namespaces too.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any, NoReturn

from lm.errors import UserError


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


class Missing:
    """A name that TensorFlow 2 does not have. It can be imported, and fails when it is called.

    `fix_of` returns the replacement of a full name, such as `contrib.opt.AdamWOptimizer`.
    """

    def __init__(self, name: str, fix_of: Callable[[str], str]):
        self.__name__, self._fix_of = name, fix_of

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("_"):  # Python looks for optional names
            raise AttributeError(name)
        return self.__dict__.setdefault(name, Missing(f"{self.__name__}.{name}", self._fix_of))

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        fix = self._fix_of(self.__name__)
        raise UserError(f"tf.{self.__name__} does not exist in TensorFlow 2; use {fix}")

    def __mro_entries__(self, bases: tuple) -> tuple:
        return (type(self.__name__, (), {"__init__": self}),)

    def __instancecheck__(self, value: Any) -> bool:
        return False
