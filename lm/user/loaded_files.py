"""The files that a config file loads with `lm.tf1` or imports: paths, checksums and copies.

The name of a loaded file is its path relative to the directory of the config file. A copy of a
config file finds copies of its files in the directory `loaded_files` next to it.
"""

import contextlib
import hashlib
import importlib.machinery
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator

from lm.errors import UserError
from lm.files import sha256_of, write_atomically
from lm.user.code import is_of_library, is_of_user

_COPIES = "loaded_files"


class LoadedFiles:
    """The files that a config file has loaded so far."""

    def __init__(self, config_file: str, key: str):
        self._directory = os.path.dirname(os.path.abspath(config_file))
        self.key = key  # identifies this version of the config file
        self._paths: dict[str, str] = {}  # absolute paths by name
        self.sha256: dict[str, str] = {}  # checksums by name
        # Adapts the functions of the config file to the loaded files.
        self.adapt: Callable[[Callable], Callable] = lambda function: function

    def find(self, name: str) -> str:
        """Return the absolute path of a file, or of its copy next to a copied config file."""
        copy = os.path.join(self._directory, _copy_of(name))
        return (
            copy if os.path.exists(copy) else os.path.abspath(os.path.join(self._directory, name))
        )

    def add(self, name: str, path: str, source: bytes) -> None:
        """Record a file that is about to be executed."""
        self._paths[name] = path
        self.sha256[name] = hashlib.sha256(source).hexdigest()

    def add_modules(self, modules: Iterable[types.ModuleType]) -> None:
        """Record the imported modules that are next to the config file, or in a copy."""
        recorded = set(self._paths.values())
        copies = os.path.join(self._directory, _COPIES)
        for path in (getattr(module, "__file__", None) for module in modules):
            if not path or path in recorded or not is_of_user(path):
                continue
            root = copies if _is_inside(path, copies) else self._directory
            if _is_inside(path, root):
                self.add(os.path.relpath(path, root), path, pathlib.Path(path).read_bytes())

    def check_unchanged(self) -> None:
        """Raise UserError if a file has changed since this process, a notebook, executed it."""
        for name, path in self._paths.items():
            if sha256_of(path) != self.sha256[name]:
                raise UserError(f"{name} has changed since this process loaded it: restart Python")

    def copy_to(self, directory: str) -> None:
        """Copy the files for a copy of the config file in a directory."""
        for name, path in self._paths.items():
            copy = os.path.join(directory, _copy_of(name))
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            write_atomically(copy, pathlib.Path(path).read_bytes())

    def is_copied_to(self, directory: str) -> bool:
        """Return whether a directory contains copies of the files."""
        copies = {name: os.path.join(directory, _copy_of(name)) for name in self._paths}
        return all(
            os.path.exists(copy) and sha256_of(copy) == self.sha256[name]
            for name, copy in copies.items()
        )


_loading: list[LoadedFiles] = []  # the files of the config file that is being loaded


@contextlib.contextmanager
def collected_by(files: LoadedFiles) -> Iterator[None]:
    """Let the config file that is being loaded add its files to a collection."""
    _loading.append(files)
    try:
        yield
    finally:
        _loading.pop()


def current_files(what: str) -> LoadedFiles:
    if not _loading:
        raise UserError(f"{what} in a function: move it to the top of the file")
    return _loading[-1]


_imported: dict[str, types.ModuleType] = {}  # the modules that config files have imported


@contextlib.contextmanager
def fresh_modules(config_file: str) -> Iterator[Callable[[], list[types.ModuleType]]]:
    """Let a config file execute the modules next to it, even if this process has imported them.

    Otherwise, a notebook would train with old versions of its modules, or with the modules of a
    different config file. The notebook keeps the modules that it has imported itself.

    Yields:
      A function that returns the modules that the config file has imported so far.
    """
    beside = os.path.dirname(os.path.abspath(config_file))
    directories = [beside, os.path.join(beside, _COPIES)]  # the second one is next to a copy
    sys.path[:] = [*directories, *(d for d in sys.path if d not in directories)]  # as for a script
    find = importlib.machinery.PathFinder.find_spec
    names = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
    names = {name for name in names if find(name, directories)}
    taken = {}
    for name, module in list(sys.modules.items()):
        # Check the name first, because reading an attribute of some modules imports other modules.
        if name.partition(".")[0] in names and not _is_of_library(module):
            taken[name] = sys.modules.pop(name)
    before = set(sys.modules)

    def imported() -> list[types.ModuleType]:
        return [sys.modules[name] for name in sorted(sys.modules.keys() - before)]

    try:
        yield imported
    finally:
        own = {name: module for name, module in taken.items() if _imported.get(name) is not module}
        _imported.update((name, sys.modules[name]) for name in sys.modules.keys() - before)
        sys.modules.update(own)


def _is_of_library(module: types.ModuleType) -> bool:
    # A namespace package has no file. Built-in modules have neither a file nor a path.
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    return all(is_of_library(place) for place in places if place)


def _is_inside(path: str, directory: str) -> bool:
    return os.path.abspath(path).startswith(os.path.join(directory, ""))


def _copy_of(name: str) -> str:
    """Return the path of a copy, relative to the copied config file."""
    parts = ["up" if part == os.pardir else part for part in os.path.normpath(name).split(os.sep)]
    return os.path.join(_COPIES, *parts)  # an absolute path loses its leading slash
